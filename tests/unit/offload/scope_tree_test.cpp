#include "offload/scope_tree.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "expect_throws.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

class ScopeTreeTest : public testing::Test {
 protected:
  ScopeNode* enter(const std::string& name) { return tree_.child(tree_.root(), name); }
  bool switched(const std::string& pattern, bool on) { return tree_.switch_offload(NamePatterns({pattern}), on); }

  ScopeTree tree_{NamePatterns({"a.**", "b"}), NamePatterns({"a.x"})};
};

TEST_F(ScopeTreeTest, ASwitchHoldsForScopesThatWereEnteredAndForLaterOnes) {
  const ScopeNode* const before = enter("a.x");
  EXPECT_TRUE(switched("a.**", false));
  const ScopeNode* const after = enter("a.y");
  EXPECT_FALSE(before->selected || before->delayed || after->selected);
  EXPECT_TRUE(enter("b")->selected);
  EXPECT_TRUE(switched("a.**", true));
  EXPECT_TRUE(before->selected && before->delayed && after->selected);
}

TEST_F(ScopeTreeTest, TheLatestSwitchHoldsAndOnSelectsNothingByItself) {
  const ScopeNode* const x = enter("a.x");
  const ScopeNode* const other = enter("c");
  EXPECT_TRUE(switched("all", false));
  EXPECT_TRUE(switched("a.*", true));
  EXPECT_TRUE(x->selected);
  EXPECT_FALSE(switched("c", true));
  EXPECT_FALSE(other->selected);
  EXPECT_TRUE(switched("all", false));
  EXPECT_FALSE(x->selected);
  EXPECT_EQ(tree_.describe_switches(), "\"**\" off") << "what it covers is forgotten";
}

TEST_F(ScopeTreeTest, ASwitchThatChangesNoKnownScopeSaysSo) {
  (void)enter("a.x");
  EXPECT_FALSE(switched("b", false)) << "not entered yet";
  EXPECT_FALSE(enter("b")->selected);
  EXPECT_FALSE(switched("b", false));
  EXPECT_FALSE(switched("a.x", true));
  EXPECT_TRUE(switched("b", true));
  EXPECT_EQ(tree_.describe_switches(), "");
}

TEST_F(ScopeTreeTest, WhatIsSavedOutsideOfScopesIsNeverOffloaded) {
  ScopeTree all{NamePatterns({"**"})};
  (void)all.switch_offload(NamePatterns({"**"}), false);
  (void)all.switch_offload(NamePatterns({"**"}), true);
  EXPECT_FALSE(all.root()->selected);
}

TEST_F(ScopeTreeTest, OnlyKnownScopesAndSwitchesPassTheCheck) {
  (void)enter("a.x");
  tree_.require_known(NamePatterns({"none", "a.*"}));
  (void)switched("none", false);
  tree_.require_known(NamePatterns({"none"}));
  EXPECT_THROWS(UsageError, "\"none\" matches no scope", tree_.require_known_switches());
  EXPECT_THROWS(UsageError, "\"other\" matches no scope", tree_.require_known(NamePatterns({"other"})));
}

TEST_F(ScopeTreeTest, ANameThatIsSwitchedOnAgainNeedNoScope) {
  (void)enter("a.x");
  (void)switched("a.x", false);
  (void)switched("none", false);
  EXPECT_THROWS(UsageError, "\"none\" matches no scope", tree_.require_known_switches());
  (void)switched("none", true);
  tree_.require_known_switches();
}

TEST_F(ScopeTreeTest, NamesOfTheOptionsDoNotDependOnSwitches) {
  (void)enter("a.x");
  (void)switched("a.x", false);
  EXPECT_EQ(tree_.selected_names(), std::vector<std::string>{"a.x"});
}

}  // namespace
}  // namespace sidestream

#include "offload/name_pattern.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "expect_throws.h"
#include "sidestream/error.h"

namespace sidestream {
namespace {

std::string refusal(const NamePatterns& patterns, const std::vector<std::string>& known,
                    NameKind kind = NameKind::scope) {
  try {
    patterns.require_each_matches(known, kind);
  } catch (const UsageError& error) {
    return error.what();
  }
  return "";
}

TEST(NamePattern, ComponentsAndWildcards) {
  struct Case {
    const char* pattern;
    const char* name;
    bool matches;
  };
  for (const Case& one : std::vector<Case>{
           {"blocks.3", "blocks.3", true},
           {"blocks.3", "blocks.3.fc1", false},
           {"blocks.3", "blocks.31", false},
           {"blocks.3", "block.3", false},
           {"blocks.*", "blocks.3", true},
           {"blocks.*", "blocks", false},
           {"blocks.*", "blocks.3.fc1", false},
           {"*", "blocks", true},
           {"*", "a.b", false},
           {"*.fc1", "blocks.fc1", true},
           {"blocks.*.core_attn", "blocks.12.core_attn", true},
           {"**", "a", true},
           {"**", "a.b.c", true},
           {"**", "", true},
           {"**.fc1", "fc1", true},
           {"**.fc1", "a.fc1", true},
           {"**.fc1", "a.b.fc1", true},
           {"**.fc1", "a.b.fc12", false},
           {"**.fc1", "a.fc1.b", false},
           {"a.**", "a", true},
           {"a.**", "a.b.c", true},
           {"a.**", "ab", false},
           {"a.**.z", "a.z", true},
           {"a.**.z", "a.b.c.z", true},
           {"a.**.z", "a.b.c", false},
           {"**.x.**", "a.b.x", true},
           {"**.x.**", "a.b.x.c.d", true},
           {"**.x.**", "a.b.y", false},
           {"**.x.y", "x.x.y", true},
           {"**.a.**.a", "a", false},
           {"**.**", "a", true},
           {"fc*", "fc1", true},
           {"fc*", "fc", true},
           {"fc*", "gfc1", false},
           {"*_attn", "core_attn", true},
           {"e*p*t_fc*", "expert_fc1", true},
           {"e*p*t_fc*", "expert.fc1", false},
           {"a*b", "acb.b", false},
           {"blocks.1*.fc?", "blocks.10.fc1", false},
           {"a", "", false},
           {"blocks.{4..20}", "blocks.4", true},
           {"blocks.{4..20}", "blocks.12", true},
           {"blocks.{4..20}", "blocks.20", true},
           {"blocks.{4..20}", "blocks.3", false},
           {"blocks.{4..20}", "blocks.21", false},
           {"blocks.{4..20}", "blocks.200", false},
           {"blocks.{4..20}", "blocks.04", false},
           {"blocks.{4..20}", "blocks.+4", false},
           {"blocks.{4..20}", "blocks.4.mlp", false},
           {"blocks.{4..20}", "blocks", false},
           {"blocks.{4..20}.mlp", "blocks.9.mlp", true},
           {"blocks.{0..0}", "blocks.0", true},
           {"blocks.{0..18446744073709551615}", "blocks.18446744073709551616", false},
           {"blocks.{1,5,8..12}.mlp", "blocks.5.mlp", true},
           {"blocks.{1,5,8..12}.mlp", "blocks.8.mlp", true},
           {"blocks.{1,5,8..12}.mlp", "blocks.6.mlp", false},
           {"blocks.{ 1, 5 }.mlp", "blocks.5.mlp", true},
           {"blocks.{2..3}.{qkv,fc*}", "blocks.3.fc1", true},
           {"blocks.{2..3}.{qkv,fc*}", "blocks.3.proj", false},
           {"expert{0..11}_fc1", "expert11_fc1", true},
           {"expert{0..11}_fc1", "expert12_fc1", false},
           {"expert{0..1}*", "expert11_fc1", true},
           {"*{7..9}", "layer19", true},
           {"*{7..9}", "layer1", false},
           {"**.{fc1,fc2}", "blocks.0.fc2", true},
           {"{a,b}.**", "b.c.d", true},
           {"{a}", "a", true},
           {"{a}", "{a}", false},
       }) {
    EXPECT_EQ(name_matches(one.pattern, one.name), one.matches) << one.pattern << " on " << one.name;
  }
}

TEST(NamePattern, ManyStarsStayCheap) {
  std::string pattern, name;
  for (int i = 0; i < 40; ++i) {
    pattern += "**.a*a*a*b.";
    name += "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaa.";
  }
  // An exponential matcher would not come back.
  EXPECT_FALSE(name_matches(pattern + "end", name + "end2"));
}

TEST(NamePatterns, ListsAndWords) {
  EXPECT_TRUE(NamePatterns().empty());
  EXPECT_FALSE(NamePatterns().matches("a"));
  EXPECT_TRUE(NamePatterns::parse("").empty());
  EXPECT_TRUE(NamePatterns::parse(" off ").empty());
  EXPECT_EQ(NamePatterns::parse("all").patterns(), std::vector<std::string>{"**"});
  const NamePatterns list = NamePatterns::parse("blocks.*.qkv, **.fc1");
  EXPECT_EQ(list.patterns(), (std::vector<std::string>{"blocks.*.qkv", "**.fc1"}));
  EXPECT_TRUE(list.matches("blocks.0.qkv"));
  EXPECT_TRUE(list.matches("fc1"));
  EXPECT_FALSE(list.matches("blocks.0.proj"));
}

TEST(NamePatterns, RefusesMalformedOnes) {
  for (const char* list : {"a,,b", "a..b", ".a", "a.", ",", "a,off"}) {
    EXPECT_THROW((void)NamePatterns::parse(list), UsageError) << list;
  }
  EXPECT_THROW(NamePatterns({""}), UsageError);
}

TEST(NamePatterns, CommasInBracesDoNotSplitAList) {
  const NamePatterns list = NamePatterns::parse("blocks.{1,5,8..12}.mlp, head,{a, b}");
  EXPECT_EQ(list.patterns(), (std::vector<std::string>{"blocks.{1,5,8..12}.mlp", "head", "{a, b}"}));
  EXPECT_TRUE(list.matches("blocks.12.mlp"));
  EXPECT_TRUE(list.matches("b"));
  EXPECT_FALSE(list.matches("blocks.13.mlp"));
}

TEST(NamePatterns, RefusesMalformedBracesWithTheRemedy) {
  struct Case {
    const char* list;
    const char* remedy;
  };
  for (const Case& one : std::vector<Case>{
           {"blocks.{4..}", "an integer without leading zeros on either side, such as {4..20}"},
           {"blocks.{..4}", "the range \"..4\""},
           {"blocks.{..}", "the range \"..\""},
           {"blocks.{4...20}", "the range \"4...20\""},
           {"blocks.{4..8..20}", "the range \"4..8..20\""},
           {"blocks.{04..20}", "without leading zeros"},
           {"blocks.{-1..3}", "the range \"-1..3\""},
           {"blocks.{a..c}", "the range \"a..c\""},
           {"blocks.{0..18446744073709551616}", "the range \"0..18446744073709551616\""},
           {"blocks.{20..4}", "which is empty; write {4..20}"},
           {"blocks.{4..20.mlp", "without the other; write both, such as blocks.{4..20}.mlp"},
           {"blocks.4..20}.mlp", "empty component"},
           {"blocks.4}.mlp", "write both"},
           {"blocks.}4{", "write both"},
           {"blocks.{4,head", "write both"},
           {"{{4}}", "more than one pair of braces"},
           {"expert{0,1}_fc{1,2}", "more than one pair of braces in one component; write one pattern for each"},
           {"blocks.{}", "an empty alternative"},
           {"blocks.{1,}", "an empty alternative in its braces; write names or ranges"},
           {"blocks.{1,,2}", "an empty alternative"},
           {"{blocks.0,head}", "has a dot in its braces"},
           {"blocks.*, head, blocks.*", "name pattern \"blocks.*\" is given twice; give each pattern once"},
           {"all,**", "\"**\" is given twice"},
       }) {
    EXPECT_THROWS(UsageError, one.remedy, (void)NamePatterns::parse(one.list)) << one.list;
  }
}

TEST(NamePatterns, ARangeThatMatchesNothingListsTheNumbersThereAre) {
  const std::vector<std::string> known{"blocks.2.mlp", "blocks.0.mlp", "blocks.11.mlp", "blocks.x.mlp", "head"};
  EXPECT_EQ(refusal(NamePatterns::parse("blocks.{3..40}.mlp"), known), "");
  const std::string message = refusal(NamePatterns::parse("blocks.{12..40}.mlp"), known);
  EXPECT_NE(message.find("blocks.{0..11}.mlp, blocks.x.mlp, head"), std::string::npos) << message;
}

const std::string kIfLater = ". If the first step was given up or ran less than later ones, call OffloadEngine::reset";

TEST(NamePatterns, EachMustMatchANameThatThereIs) {
  const std::vector<std::string> known{"blocks.0.qkv", "blocks.0.core_attn", "blocks.1.qkv", "blocks.1.core_attn"};
  EXPECT_EQ(refusal(NamePatterns::parse("blocks.*.qkv,all"), known), "");
  EXPECT_EQ(refusal(NamePatterns::parse("blocks.*.qkv,core_attn"), known),
            "name pattern \"core_attn\" matches no scope; did you mean \"**.core_attn\"? The names are: blocks.*.qkv, "
            "blocks.*.core_attn" +
                kIfLater);
  EXPECT_NE(refusal(NamePatterns::parse("blocks.*.core_atn"), known).find("did you mean \"blocks.*.core_attn\"?"),
            std::string::npos);
  EXPECT_EQ(refusal(NamePatterns::parse("zzzzzzzz"), known).find("did you mean"), std::string::npos);
  EXPECT_NE(refusal(NamePatterns::parse("all"), {}).find("no scopes at all"), std::string::npos);
}

TEST(NamePatterns, ASuggestionWorksAsAPattern) {
  const auto suggests = [](const char* list, const std::vector<std::string>& known) {
    return refusal(NamePatterns::parse(list), known).find("did you mean") != std::string::npos;
  };
  EXPECT_FALSE(suggests("{1}", {"{1}"}));
  EXPECT_FALSE(suggests("x", {"x,y"})) << "a comma separates patterns";
  EXPECT_FALSE(suggests("a", {"a}"})) << "no pattern";
  EXPECT_FALSE(suggests("x", {"\\"})) << "they have nothing in common";
  EXPECT_TRUE(suggests("x", {"xy"}));
  EXPECT_TRUE(suggests("{1}", {"{1}", "a1"}));
}

TEST(NamePatterns, AnErrorSaysWhetherScopesOrCallsHaveTheNames) {
  const NamePatterns patterns({"blocks.*"});
  EXPECT_EQ(refusal(patterns, {}),
            "name pattern \"blocks.*\" matches no scope; the step had no scopes at all" + kIfLater);
  EXPECT_EQ(refusal(patterns, {}, NameKind::call),
            "name pattern \"blocks.*\" matches no call; the step had no calls at all: call what is to be graphed with "
            "ss::call" +
                kIfLater);
  EXPECT_EQ(refusal(patterns, {"attention"}, NameKind::call),
            "name pattern \"blocks.*\" matches no call; the names are: attention" + kIfLater);
}

TEST(NamePatterns, LongListsOfNamesAreShortened) {
  std::vector<std::string> known;
  for (int i = 0; i < 100; ++i) {
    known.push_back("scope" + std::to_string(i));
  }
  const std::string message = refusal(NamePatterns::parse("other.name"), known);
  EXPECT_NE(message.find("scope0, scope1,"), std::string::npos) << message;
  EXPECT_NE(message.find("and 76 more"), std::string::npos) << message;
  EXPECT_EQ(message.find("scope24"), std::string::npos) << message;
}

}  // namespace
}  // namespace sidestream

#include "offload/name_pattern.h"

#include <string>
#include <vector>

#include <gtest/gtest.h>

#include "sidestream/error.h"

namespace sidestream {
namespace {

std::string refusal(const NamePatterns& patterns, const std::vector<std::string>& known) {
  try {
    patterns.require_each_matches(known);
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

TEST(NamePatterns, EachMustMatchANameThatThereIs) {
  const std::vector<std::string> known{"blocks.0.qkv", "blocks.0.core_attn", "blocks.1.qkv", "blocks.1.core_attn"};
  EXPECT_EQ(refusal(NamePatterns::parse("blocks.*.qkv,all"), known), "");
  EXPECT_EQ(refusal(NamePatterns::parse("blocks.*.qkv,core_attn"), known),
            "name pattern \"core_attn\" matches no scope; did you mean \"**.core_attn\"? The names are: blocks.*.qkv, "
            "blocks.*.core_attn");
  EXPECT_NE(refusal(NamePatterns::parse("blocks.*.core_atn"), known).find("did you mean \"blocks.*.core_attn\"?"),
            std::string::npos);
  EXPECT_EQ(refusal(NamePatterns::parse("zzzzzzzz"), known).find("did you mean"), std::string::npos);
  EXPECT_NE(refusal(NamePatterns::parse("all"), {}).find("no scopes at all"), std::string::npos);
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

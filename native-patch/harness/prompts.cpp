#include "prompts.h"

namespace harness {

namespace {

const char * const WORDS[] = {
    "the",  "little", "girl",  "and",    "her",   "dog",   "went",  "to",    "a",     "big",    "park",  "where",  "they",  "saw",  "red",   "ball",
    "he",   "said",   "that",  "it",     "was",   "very",  "good",  "day",   "for",   "play",   "with",  "friend", "under", "old",  "tree",  "near",
    "lake", "one",    "boy",   "found",  "small", "box",   "full",  "of",    "bread", "but",    "bird",  "took",   "some",  "then", "flew",  "away",
    "home", "mother", "asked", "what",   "they",  "did",   "so",    "told",  "story", "about",  "cat",   "who",    "liked", "milk", "when",  "sun",
};
constexpr uint64_t COUNT = sizeof WORDS / sizeof *WORDS;

// splitmix64
uint64_t next(uint64_t & state) {
    uint64_t z = (state += 0x9e3779b97f4a7c15ull);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
    return z ^ (z >> 31);
}

} // namespace

std::string prompt_text(int64_t seed, uint64_t number, int words) {
    uint64_t state = (uint64_t) seed;
    state = next(state) ^ number;
    std::string text;
    bool sentence = true;
    for (int i = 0; i < words; ++i) {
        std::string word = WORDS[next(state) % COUNT];
        if (sentence) {
            word[0] = (char) (word[0] - 'a' + 'A');
        }
        sentence = next(state) % 9 == 0;
        text += (text.empty() ? "" : " ") + word + (sentence ? "." : "");
    }
    return text;
}

} // namespace harness

#pragma once

// The prompts' text: plain words, chosen by a seed. Pure.

#include <cstdint>
#include <string>

namespace harness {

// Text of `words` words. The same seed and number give the same text on every machine.
std::string prompt_text(int64_t seed, uint64_t number, int words);

} // namespace harness

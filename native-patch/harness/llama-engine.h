#pragma once

// The engine on libllama.

#include "engine.h"
#include "flags.h"

#include <memory>

namespace harness {

// Loads the model, makes contexts and prompts, and warms up; all of that is outside of what is timed. Throws engine_error.
std::unique_ptr<engine> make_llama_engine(const flags & f);

} // namespace harness

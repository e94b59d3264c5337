#pragma once

// Runs a plan on an engine: schedule, check, decode, sample, record. Knows no llama.cpp.

#include "record.h"

namespace harness {

// Fills `out` as it goes, so that a run that fails leaves its evidence. Throws violation and engine_error.
void drive(const flags & f, engine & eng, run_record & out);

} // namespace harness

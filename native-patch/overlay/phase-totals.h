#pragma once

// Sums of the phase machine. Apart from it, because server-common.h, which every server file includes, carries them: a change of
// the machine then compiles what uses the machine and nothing else.

#include <cstdint>

namespace phase {

struct totals {
    uint64_t n_prefill   = 0; // prefill phases begun
    uint64_t n_generate  = 0; // generate phases begun
    uint64_t n_yield     = 0;
    int64_t  prefill_us  = 0; // engine time, the running phase included
    int64_t  generate_us = 0;
    int64_t  wait_us     = 0; // slot time, the running waits included
    int64_t  queue_us    = 0;
    int64_t  paused_us   = 0;
};

} // namespace phase

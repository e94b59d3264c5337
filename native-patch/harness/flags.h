#pragma once

// The command line. Pure: no llama.cpp, no I/O.

#include "schedule.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace harness {

// the message names the flag and says what to do
struct flag_error : std::runtime_error {
    using std::runtime_error::runtime_error;
};

enum class cache_type : uint8_t { f16, f32, q8_0 };
enum class flash_attn : uint8_t { automatic, on, off };

const char * name(cache_type t);
const char * name(flash_attn f);

struct flags {
    plan               what;
    std::string        model;
    int                ubatch     = 512;
    cache_type         cache      = cache_type::f16;
    flash_attn         flash      = flash_attn::automatic;
    bool               kv_unified = false;
    int                threads    = 1;
    int                gpu_layers = -1; // -1: all
    std::vector<float> tensor_split;
    int                ctx        = 0;  // tokens of all sequences together; 0: what the work needs
    int64_t            seed       = 1;
    bool               mtp        = false;
    int                mtp_draft  = 3;  // tokens drafted per request at the opening
    int                memory_mib = 0;  // most address space this process may take, 0: no limit
    bool               dry_run    = false;
    bool               verbose    = false;
    bool               help       = false;
    std::string        json;            // file of the report, empty: none

    // tokens one sequence comes to hold, the longest of them
    int longest() const;
    // tokens of context for all sequences: `ctx`, or what the work needs
    int context() const;
};

// throws flag_error
flags parse_flags(const std::vector<std::string> & arguments);

const char * usage();

} // namespace harness

#pragma once

// What one run did: the evidence, and its report as JSON.

#include "engine.h"
#include "flags.h"

#include <optional>
#include <string>
#include <vector>

namespace harness {

struct batch_record {
    int64_t t_start_us = 0;
    int64_t t_end_us   = 0;
    int64_t cpu_us     = 0;
    step    what;
};

struct event_record {
    int64_t     t_us = 0;
    const char * event = ""; // admit, ready, open, first_token, release
    int         request = -1;
    int         slot    = -1;
    int         cohort  = 0;
};

struct request_record {
    int     slot             = -1;
    int     cohort           = 0;
    int64_t t_admit_us       = -1;
    int64_t t_prompt_done_us = -1;
    int64_t t_first_token_us = -1;
    int64_t t_end_us         = -1;
    std::vector<int> tokens;
    std::vector<int> drafted;
    uint64_t first_row_hash = 0;
    double   smallest_gap   = -1; // over its tokens
};

struct run_record {
    std::vector<batch_record>   batches;
    std::vector<event_record>   events;
    std::vector<request_record> requests;
    work    done;
    int64_t samples     = 0;
    int64_t t_end_us    = 0; // after the last token
    int64_t draft_us    = 0;
    bool    complete    = false;
};

struct failure {
    std::string kind;    // invariant, memory, model, context, decode
    std::string name;    // of the invariant, or the stage that failed
    std::string message;
};

// FNV-1a over the tokens
uint64_t hash_tokens(const std::vector<int> & tokens, uint64_t seed = 0xcbf29ce484222325ull);
std::string hex(uint64_t value);

std::string report(const flags & f, const std::optional<engine_facts> & facts, const run_record & run, const std::optional<failure> & failed);

// write `text` to `path` whole or not at all; throws engine_error
void write_atomically(const std::string & path, const std::string & text);

} // namespace harness

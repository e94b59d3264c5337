#pragma once

// What the server's structs carry for the phase machine. Included by server-common.h, so it includes nothing of the server.

#include "phase-totals.h"

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

namespace phase {
class machine;
}

// travels with a task
struct server_phase_tag {
    std::string request;        // of the header x-request-id
    int32_t     gather_ms = -1; // of the header x-phase-gather-ms, -1: none
    int64_t     since     = -1; // of the query parameter phase_since, -1: the ordinary view

    // The request's tag. Characters outside of [A-Za-z0-9._-] and all beyond 64 are dropped; a window that is no number of
    // milliseconds in 0..1000 counts as none.
    static server_phase_tag from_headers(const std::map<std::string, std::string> & headers);

    // -1 if the text is no sequence number
    static int64_t parse_since(const std::string & text);
};

// part of a slot
struct server_phase_slot {
    std::vector<float> row;            // logits of the last prompt token, kept until the first token is sampled
    bool is_opening      = false;      // the first token is due, from the row
    bool use_backend     = false;      // attach the backend sampler after the first token
    bool sent_begin      = false;      // the client knows that the prompt is being processed
    bool sent_progress   = false;      // the client knows that the prompt is whole
    bool warned_endless  = false;
    int  n_steps         = 0;          // decode steps since the opening
};

// part of server_metrics
struct server_phase_metrics {
    int    state = 0; // 0 idle, 1 prefill open, 2 prefill sealed, 3 generate
    size_t n_queued   = 0;
    size_t n_prefill  = 0;
    size_t n_ready    = 0;
    size_t n_generate = 0;
    size_t n_paused   = 0;

    phase::totals sums;

    uint64_t n_prompt_batches   = 0; // decode calls that held prompt tokens
    uint64_t n_generate_batches = 0; // decode calls that held generated tokens
    uint64_t n_mixed_batches    = 0; // decode calls that held both
    uint64_t n_early_tokens     = 0; // tokens sampled while a member of the cohort still processed its prompt

    void update(const phase::machine & machine, int64_t now);

    // Prometheus text
    std::string to_text() const;
};

// tokens of one slot in a decoded view
struct server_phase_share {
    int  n_prompt   = 0;
    int  n_generate = 0;
};

// writes one line per decoded view to the file (or stderr) that LLAMA_PHASE_TRACE names
struct server_phase_trace {
    server_phase_trace();
    ~server_phase_trace();
    server_phase_trace(const server_phase_trace &) = delete;
    server_phase_trace & operator=(const server_phase_trace &) = delete;

    // shares: per slot, in slot order
    void view(const phase::machine & machine, const char * kind, const std::vector<server_phase_share> & shares, int64_t now);

private:
    void * file = nullptr; // FILE *
};

#pragma once

// What the drive loop needs of an engine: the real one on libllama, or one without a model.

#include "invariants.h"

#include <cstdint>
#include <functional>
#include <stdexcept>
#include <string>
#include <vector>

namespace harness {

// an engine could not do what was asked; kind is `memory`, `model`, `context`, `decode` or `report`
struct engine_error : std::runtime_error {
    std::string kind;
    std::string stage; // what was being done

    engine_error(const std::string & kind, const std::string & stage, const std::string & message)
        : std::runtime_error(stage + ": " + message), kind(kind), stage(stage) {}
};

struct engine_facts {
    std::string build;
    std::string model;
    int         n_vocab   = 0;
    int         n_ctx     = 0;
    int         n_ctx_seq = 0;
    int         n_outputs = 0; // most rows of logits per computation
    int64_t     load_us   = 0;
    std::vector<std::string> devices;
};

struct sampled_token {
    int      id   = 0;
    double   gap  = 0;  // logit of the best minus that of the second best
    uint64_t hash = 0;  // of the row it was taken from
};

// one request's opening under --mtp
struct opening {
    int request   = 0;
    int slot      = 0;
    int pos       = 0; // of the token sampled first
    int token     = 0;
};

class engine {
  public:
    virtual ~engine() = default;

    virtual engine_facts facts() const = 0;

    // monotonic microseconds
    virtual int64_t now_us() = 0;

    // CPU time of this process, all its threads, in microseconds: what a loaded machine adds to now_us() is not in it
    virtual int64_t cpu_us() = 0;

    // put the step's tokens into the batch; `generated(request, index)` is the request's index-th sampled token
    virtual void build(const step & s, const std::function<int(int, int)> & generated) = 0;

    // what is in the batch, read back from it
    virtual std::vector<entry> contents() const = 0;

    // decode the batch and wait until it is done
    virtual void decode() = 0;

    // copy the logits at `index` of the decoded batch: the next decode overwrites them
    virtual void retain(int request, int index) = 0;

    virtual sampled_token sample_row(int index) = 0;
    virtual sampled_token sample_retained(int request) = 0;
    virtual void drop_retained(int request) = 0;

    // drafts of the requests that open now, in their order; empty without --mtp
    virtual std::vector<std::vector<int>> draft(const std::vector<opening> & opened) = 0;

    virtual void release(int slot) = 0;
};

} // namespace harness

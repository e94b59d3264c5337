#pragma once

// What must hold in every run, checked from what was put into batches and sampled, never from what was planned.
//
// Pure. The monitor keeps its own account of each sequence and knows nothing of the scheduler. A violation is thrown, in every
// kind of build.

#include "schedule.h"

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

namespace harness {

struct violation : std::runtime_error {
    std::string invariant;

    violation(const std::string & invariant, const std::string & detail);
};

// one token of a batch, as the engine will see it
struct entry {
    int seq = 0; // sequence id: the slot
    int pos = 0;
};

// token work; equal for all policies
struct work {
    int64_t prompt    = 0; // prompt tokens decoded
    int64_t generated = 0; // tokens sampled
    int64_t fed       = 0; // generated tokens decoded
    bool operator==(const work & other) const;
};

// names of the invariants that apply to a policy
std::vector<std::string> invariants_of(policy p);

class monitor {
  public:
    explicit monitor(const plan & p);

    void on_admit(int request, int slot);
    void on_batch(const std::vector<entry> & batch);
    void on_sample(int request);
    void on_release(int request);

    // all work is done; the work must be `expected`
    void on_end(const work & expected) const;

    const work & done() const { return total; }
    int64_t batches() const { return n_batches; }
    int64_t samples() const { return n_samples; }

  private:
    struct account {
        bool live      = false;
        bool ended     = false;
        int  slot      = -1;
        int  decoded   = 0; // tokens of any kind: the next position
        int  generated = 0;
    };

    plan                 what;
    std::vector<account> requests;
    std::vector<int>     owner; // request per slot, -1: free
    int                  serial = -1; // the request that owns the prefill under barrier-serial
    work                 total;
    int64_t              n_batches = 0;
    int64_t              n_samples = 0;

    bool exclusive() const { return what.pol != policy::mixed; }
    bool in_prompt(int request) const { return requests[request].decoded < what.lengths[request]; }

    void check_owner(const std::vector<int> & prompts);
};

// the work of a plan, found by running its schedule under the monitor without an engine; throws violation
work simulate(const plan & p);

// the work of a plan under every policy; throws violation("equal-work") where two differ
work simulate_all(plan p);

} // namespace harness

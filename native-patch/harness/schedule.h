#pragma once

// Which tokens go into which batch, under each policy. Pure: no llama.cpp, no clock, no I/O.
//
// All requests are there at the start. They take slots in order; under a barrier policy those that hold slots together are a
// cohort, and the next cohort begins when the last member of this one has ended. Under `mixed` a free slot is taken at once.
//
//   mixed           generated tokens first, then prompts in slot order into the room that is left
//   barrier-greedy  prompts in slot order, each takes what it can
//   barrier-fair    water-filling: shortest rest first, each gets an equal part of the room that is left
//   barrier-serial  one prompt at a time owns the batch until it is whole
//
// Under the three barrier policies no generated token shares a batch with a prompt token, and every first token of a cohort is
// sampled at one moment, the opening, when its last prompt is whole.

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace harness {

enum class policy : uint8_t { mixed, barrier_greedy, barrier_fair, barrier_serial };
enum class phase : uint8_t { prefill, generate, mixed };

// faults planted on purpose, to show that the invariants see them
enum class plant : uint8_t { none, early, mixed };

const char * name(policy p);
const char * name(phase p);

// every policy, in the order of reports
const std::vector<policy> & all_policies();

// nullopt if the text names no policy
std::optional<policy> parse_policy(const std::string & text);

// the work to be done; lengths in tokens, one entry per request
struct plan {
    policy           pol     = policy::barrier_fair;
    std::vector<int> lengths;
    int              predict = 1; // tokens sampled per request
    int              slots   = 1;
    int              batch   = 1; // most tokens of one decode call, at least `slots`
    plant            fault   = plant::none;
};

// one contiguous run of one request's tokens in a batch
struct chunk {
    int  slot        = 0;
    int  request     = 0;
    int  pos         = 0; // of its first token
    int  n           = 0;
    bool prompt      = true;
    bool ends_prompt = false; // its last token is the prompt's last: the row to sample the first token from
};

// one batch
struct step {
    phase              ph     = phase::prefill;
    int                cohort = 0; // counts from 1; under `mixed` always 1
    std::vector<chunk> chunks;

    int n_prompt() const;
    int n_generated() const;
};

struct admission {
    int request = 0;
    int slot    = 0;
};

// one token to sample now
struct sampling {
    int  request = 0;
    int  slot    = 0;
    bool first   = false;
};

class scheduler {
  public:
    explicit scheduler(const plan & p);

    // requests that take a slot now; to be asked before next()
    std::vector<admission> admit();

    // the next batch, nullopt when all work is done
    std::optional<step> next();

    // `s` was decoded
    void decoded(const step & s);

    // tokens to sample after the batch that was decoded last, in slot order
    std::vector<sampling> to_sample() const;

    // one token of the request was sampled; true when that was its last: its slot is free
    bool sampled(int request);

    int cohort() const { return n_cohorts; }

  private:
    struct state {
        int slot      = -1;
        int prompt    = 0; // prompt tokens decoded
        int fed       = 0; // generated tokens decoded
        int generated = 0; // tokens sampled
    };

    plan               what;
    std::vector<state> requests;
    std::vector<int>   owner; // request per slot, -1: free
    int                waiting   = 0; // first request that has no slot yet
    int                n_cohorts = 0;

    bool exclusive() const { return what.pol != policy::mixed; }
    int  rest(int request) const;
    bool prompts_left() const;

    int  room_for_prompts(step & s) const;
    void fill_in_order(step & s, int room) const;
    void fill_fair(step & s, int room) const;
    void fill_one(step & s, int room) const;
    void fill_generated(step & s) const;
    void add_prompt(step & s, int request, int n) const;
    void plant_mixed(step & s) const;
};

} // namespace harness

#pragma once

// The phase machine: decides who may process a prompt and who may generate, so that no batch ever holds both.
//
// Pure: no llama.cpp include, no clock, no lock, no I/O. Time is passed in as monotonic microseconds and never goes back.
// Events only record what happened; every change of the engine's phase happens in advance(). The owner calls advance() at the
// top of each step, with all events of the previous step recorded.
//
//   engine: IDLE -> PREFILL (open -> sealed) -> GENERATE -> IDLE
//   slot:   NONE -> QUEUED -> PREFILL -> READY -> GENERATE -> NONE, and GENERATE -> PAUSED -> GENERATE under `yield`
//
// What always holds under an exclusive policy (check() verifies it):
//   - a slot is in PREFILL, READY or PAUSED only while the engine is in PREFILL; in GENERATE only while the engine is in GENERATE
//   - a member is READY only in a sealed cohort; nobody enters a sealed cohort
//   - after advance(): the engine is in PREFILL only with a slot in PREFILL, in GENERATE only with a slot in GENERATE, and IDLE with
//     a slot QUEUED only while wake_at() names the moment at which that ends

#include "phase-totals.h"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace phase {

enum class policy : uint8_t { mixed, drain, yield };
enum class engine : uint8_t { idle, prefill, generate };
enum class member : uint8_t { none, queued, prefill, ready, generate, paused };

// sampling: answers token by token after the opening; prefill_only: answered and released at the end of its prompt
enum class task_kind : uint8_t { sampling, prefill_only };

// admit:   slot, tokens = prompt length; cohort 0: it queues, otherwise it processes its prompt from now on as a member of that cohort
// seal:    slot = the member that finished first, tokens = members of the cohort
// ready:   slot, tokens = prompt length
// open:    slot -1, tokens = members that generate from now on (under `mixed`: one slot, on its own)
// pause, resume: slot, tokens = tokens held
// release: slot, tokens = tokens generated
// idle:    slot -1
enum class event_kind : uint8_t { admit, seal, ready, open, pause, resume, release, idle };

const char * name(policy p);
const char * name(engine e);
const char * name(member m);
const char * name(event_kind e);

// nullopt if the text names no policy
std::optional<policy> parse_policy(const std::string & text);

struct config {
    policy  pol         = policy::drain;
    int64_t yield_us    = 2000000; // `yield`: how long generation runs while somebody is queued
    int64_t admit_us    = 0;       // admit window of a task that brings none of its own
    int64_t pool_tokens = 0;       // tokens that all sequences share, 0: each sequence has its own room
};

// one task that was put on a slot
struct admission {
    int         slot      = -1;
    task_kind   kind      = task_kind::sampling;
    int64_t     n_prompt  = 0;  // prompt length in tokens, cached ones included
    int64_t     n_shared  = 0;  // of these, tokens that live in another member's cells
    int64_t     n_final   = 0;  // the most tokens the sequence can come to hold, 0: unknown
    int64_t     gather_us = -1; // admit window of this task, -1: the configured one
    std::string request;        // tag that ties the slot to a request, may be empty
};

struct transition {
    uint64_t    seq    = 0;
    int64_t     t_us   = 0;
    event_kind  event  = event_kind::idle;
    int         slot   = -1;
    uint64_t    cohort = 0;
    int64_t     tokens = 0;
    std::string request;
};

// transitions after a sequence number; lost = transitions in between that the ring no longer holds
struct transitions {
    uint64_t                seq  = 0; // number of the newest transition
    uint64_t                lost = 0;
    std::vector<transition> events;
};

struct slot_view {
    member      state     = member::none;
    uint64_t    cohort    = 0; // 0 while queued or none
    int64_t     queue_us  = 0; // time queued
    int64_t     wait_us   = 0; // time at the barrier
    int64_t     paused_us = 0;
    std::string request;
};

// a slot that may generate from now on
struct opening {
    int     slot     = -1;
    bool    resumed  = false; // it was paused, otherwise its first token is due
    int64_t waited_us = 0;    // the time at the barrier, or in the pause
};

class machine {
public:
    static constexpr size_t ring_size = 1024;

    // New slots (all NONE) and settings. Sequence numbers, cohort ids and totals go on: a reloaded context continues the count.
    void configure(const config & cfg, size_t n_slots, int64_t now);

    const config & settings() const { return cfg; }

    bool exclusive() const { return cfg.pol != policy::mixed; }

    // --- events

    // Tasks put on slots; one call is one indivisible group (a parent and its children). The slots must be NONE.
    void on_admit(const std::vector<admission> & group, int64_t now);

    // The prompt of a PREFILL slot is whole. Seals the cohort if the task is a sampling one, and the member waits; a prefill-only
    // member is about to be released and stays as it is.
    void on_prompt_done(int slot, int64_t now);

    // A GENERATE slot took part in a decode; n_held = tokens its sequence holds now, n_generated = tokens it answered so far.
    void on_generate_step(int slot, int64_t n_held, int64_t n_generated);

    // The slot's task ended, for whatever reason. Nothing happens if the slot is NONE.
    void on_release(int slot, int64_t n_generated, int64_t now);

    // There is no room for the prompt of a PREFILL slot: it queues again and joins no yielded cohort any more.
    void on_no_room(int slot, int64_t now);

    // --- transitions

    // Moves on until nothing more is due.
    void advance(int64_t now);

    // Only the way to IDLE when no member is left; what comes next is left to advance().
    void settle(int64_t now);

    // Slots that advance() opened since the last call, in slot order; released ones are left out.
    std::vector<opening> take_opened();

    // --- queries

    bool can_prefill (int slot) const; // always true under `mixed`
    bool can_generate(int slot) const; // always true under `mixed`

    // The end of the admit window that the engine waits in; nullopt if it does not wait for one.
    std::optional<int64_t> wake_at() const;

    // `yield`: the quantum is over; the pause comes as soon as every member made a step.
    bool yield_due(int64_t now) const;

    // `yield`: the pause is due, but the pool has no room for the oldest queued group.
    bool yield_blocked(int64_t now) const;

    bool stepped(int slot) const; // made a step since the opening

    engine   state()  const { return eng; }
    bool     sealed() const { return is_sealed; }
    uint64_t cohort() const { return cohort_id; } // the newest cohort's id, it stays after the cohort ended
    size_t   n_slots() const { return slots.size(); }
    size_t   count(member m) const;
    member   state(int slot) const { return slots.at(slot).state; }
    uint64_t cohort(int slot) const { return slots.at(slot).cohort; }
    uint64_t seq() const { return last_seq; } // number of the newest transition, 0: none yet

    slot_view   view(int slot, int64_t now) const;
    totals      sums(int64_t now) const;
    transitions since(uint64_t seq) const;

    // nullptr, or what is wrong
    const char * check() const;

private:
    struct slot_state {
        member      state  = member::none;
        task_kind   kind   = task_kind::sampling;
        uint64_t    cohort = 0;
        uint64_t    group  = 0; // arrival number of the group
        int64_t     t_admit = 0;
        int64_t     t_state = 0; // begin of the present wait: QUEUED, READY or PAUSED
        int64_t     gather_us = 0;
        int64_t     n_prompt  = 0;
        int64_t     n_shared  = 0;
        int64_t     n_final   = 0;
        int64_t     n_held    = 0;
        int64_t     n_generated = 0;
        int64_t     queue_us  = 0;
        int64_t     wait_us   = 0;
        int64_t     paused_us = 0;
        bool        has_stepped = false;
        bool        no_yield    = false; // there was no room for it in a yielded cohort
        bool        is_opened   = false; // not yet taken
        bool        is_resumed  = false;
        int64_t     waited_us   = 0;
        std::string request;
    };

    bool step(int64_t now);
    void open(int64_t now);
    void become_idle(int64_t now);
    bool try_yield(int64_t now);
    bool all_stepped() const;
    void start_cohort(const std::vector<int> & members, int64_t now);
    void join(int slot, int64_t now);
    void queue(int slot, int64_t now);
    void end_wait(slot_state & s, int64_t now);
    void enter(engine next, int64_t now);
    void follow_mixed(int64_t now);

    std::vector<int> queued_in_order() const;
    std::vector<int> select(bool yielded) const;
    int64_t          need_running(bool whole) const;
    int64_t          need_of(const slot_state & s, bool whole) const;
    bool             may_join(const std::vector<admission> & group) const;

    void note(event_kind event, int slot, uint64_t cohort, int64_t tokens, int64_t now);

    config                  cfg;
    std::vector<slot_state> slots;

    engine   eng         = engine::idle;
    bool     is_sealed   = false;
    bool     has_blocked = false; // somebody waits for room: nobody overtakes him
    uint64_t cohort_id   = 0;
    size_t   n_only      = 0;     // prefill-only members that this cohort took
    uint64_t n_groups    = 0;
    int64_t  t_engine    = 0;     // begin of the present engine phase
    totals   done;                // finished phases and waits

    std::vector<transition> ring;
    uint64_t                last_seq = 0;
};

} // namespace phase

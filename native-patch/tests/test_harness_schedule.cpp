// Unit tests of the harness's schedules and invariants. No model, no framework; exits 1 if a case fails.

#include "invariants.h"
#include "prompts.h"
#include "schedule.h"

#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <string>

using namespace harness;

namespace {

int n_failed = 0;

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            std::printf("%s:%d: not true: %s\n", __func__, __LINE__, #condition);     \
            n_failed++;                                                               \
        }                                                                             \
    } while (0)

plan make(policy pol, std::vector<int> lengths, int batch, int predict = 2, int slots = 0) {
    plan p;
    p.pol     = pol;
    p.lengths = lengths;
    p.batch   = batch;
    p.predict = predict;
    p.slots   = slots ? slots : (int) lengths.size();
    return p;
}

// the batches of a whole run, as "slot:tokens" of each chunk, prompt tokens as p and generated ones as g
std::vector<std::string> shape(const plan & p) {
    std::vector<std::string> result;
    scheduler s(p);
    while (true) {
        s.admit();
        const auto next = s.next();
        if (!next) {
            return result;
        }
        std::string text;
        for (const chunk & c : next->chunks) {
            text += (text.empty() ? "" : " ") + std::to_string(c.slot) + ":" + std::to_string(c.n) + (c.prompt ? "p" : "g");
        }
        result.push_back(text);
        s.decoded(*next);
        for (const sampling & x : s.to_sample()) {
            s.sampled(x.request);
        }
    }
}

using shapes = std::vector<std::string>;

void mixed_puts_generated_tokens_first() {
    CHECK((shape(make(policy::mixed, { 4, 20 }, 8, 3)) == shapes{ "0:4p 1:4p", "0:1g 1:7p", "0:1g 1:7p", "1:2p", "1:1g", "1:1g" }));
}

void greedy_fills_in_slot_order() {
    CHECK((shape(make(policy::barrier_greedy, { 20, 4 }, 8)) == shapes{ "0:8p", "0:8p", "0:4p 1:4p", "0:1g 1:1g" }));
}

void fair_shares_the_room_and_wastes_none() {
    // shortest rest first: 4 needs less than its half, the rest goes to the long one
    CHECK((shape(make(policy::barrier_fair, { 20, 3 }, 8)) == shapes{ "1:3p 0:5p", "0:8p", "0:7p", "0:1g 1:1g" }));
    CHECK((shape(make(policy::barrier_fair, { 9, 9, 9 }, 6, 1)) == shapes{ "0:2p 1:2p 2:2p", "0:2p 1:2p 2:2p", "0:2p 1:2p 2:2p",
                                                                           "0:2p 1:2p 2:2p", "0:1p 1:1p 2:1p" }));
}

void serial_has_one_owner() {
    CHECK((shape(make(policy::barrier_serial, { 10, 3 }, 8)) == shapes{ "0:8p", "0:2p", "1:3p", "0:1g 1:1g" }));
}

void a_cohort_drains_before_the_next_one() {
    CHECK((shape(make(policy::barrier_fair, { 2, 2, 2 }, 8, 2, 2)) == shapes{ "0:2p 1:2p", "0:1g 1:1g", "0:2p", "0:1g" }));
    // mixed refills a slot at once
    CHECK((shape(make(policy::mixed, { 2, 6, 2 }, 4, 2, 2)) == shapes{ "0:2p 1:2p", "0:1g 1:3p", "0:2p 1:1p", "0:1g 1:1g" }));
}

void first_tokens_come_together() {
    for (policy pol : { policy::barrier_greedy, policy::barrier_fair, policy::barrier_serial }) {
        scheduler s(make(pol, { 3, 30, 12 }, 8));
        s.admit();
        while (const auto next = s.next()) {
            s.decoded(*next);
            const auto samples = s.to_sample();
            if (next->ph == phase::generate) {
                break;
            }
            const bool whole = std::all_of(next->chunks.begin(), next->chunks.end(), [](const chunk & c) { return c.ends_prompt; });
            CHECK(samples.empty() || (samples.size() == 3 && whole));
            for (const sampling & x : samples) {
                CHECK(x.first);
                s.sampled(x.request);
            }
        }
    }
}

// under water-filling nobody gets less than an equal part unless it needs less, and no room is left while a prompt waits
void fair_is_max_min() {
    std::mt19937 chance(7);
    for (int round = 0; round < 3000; ++round) {
        std::vector<int> lengths(1 + chance() % 6);
        for (int & length : lengths) {
            length = 1 + (int) (chance() % 40);
        }
        const int batch = (int) lengths.size() + (int) (chance() % 40);
        scheduler s(make(policy::barrier_fair, lengths, batch, 1));
        s.admit();
        const auto next = s.next();
        int total = 0;
        int most = 0;
        for (const chunk & c : next->chunks) {
            total += c.n;
            most = std::max(most, c.n);
        }
        int wanted = 0;
        for (int length : lengths) {
            wanted += length;
        }
        CHECK(total == std::min(batch, wanted));
        for (const chunk & c : next->chunks) {
            CHECK(c.n == lengths[c.request] || c.n >= most - 1);
        }
    }
}

// every plan of a large random sample keeps every invariant, and all policies do the same work
void every_schedule_keeps_every_invariant() {
    std::mt19937 chance(11);
    for (int round = 0; round < 4000; ++round) {
        plan p;
        p.lengths.resize(1 + chance() % 7);
        for (int & length : p.lengths) {
            length = 1 + (int) (chance() % 70);
        }
        p.predict = 1 + (int) (chance() % 6);
        p.slots   = 1 + (int) (chance() % p.lengths.size());
        p.batch   = p.slots + (int) (chance() % 64);
        try {
            const work w = simulate_all(p);
            CHECK(w.generated == (int64_t) p.predict * (int64_t) p.lengths.size());
        } catch (const violation & e) {
            std::printf("%s\n", e.what());
            n_failed++;
        }
    }
}

// a planted fault is found wherever a plan has a place for it, and by the right name
void planted_faults_are_found() {
    for (policy pol : { policy::barrier_greedy, policy::barrier_fair, policy::barrier_serial }) {
        for (const auto & [fault, expected] : { std::pair{ plant::early, "no-early-first-token" }, { plant::mixed, "no-mixed-batch" } }) {
            plan p = make(pol, { 16, 96 }, 32, 8);
            p.fault = fault;
            std::string found = "none";
            try {
                simulate(p);
            } catch (const violation & e) {
                found = e.invariant;
            }
            CHECK(found == expected);
        }
    }
}

void throws(const char * expected, policy pol, const std::function<void(monitor &)> & acts, int line, int slots = 2) {
    monitor m(make(pol, { 4, 6, 2 }, 8, 2, slots));
    std::string found = "none";
    try {
        acts(m);
    } catch (const violation & e) {
        found = e.invariant;
    }
    if (found != expected) {
        std::printf("line %d: expected %s, found %s\n", line, expected, found.c_str());
        n_failed++;
    }
}

std::vector<entry> run_of(int seq, int pos, int n) {
    std::vector<entry> result;
    for (int i = 0; i < n; ++i) {
        result.push_back({ seq, pos + i });
    }
    return result;
}

std::vector<entry> join(std::vector<entry> a, const std::vector<entry> & b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
}

void both(monitor & m) {
    m.on_admit(0, 0);
    m.on_admit(1, 1);
}

void each_invariant_fires_and_only_where_it_applies() {
    const auto mixed_batch = [](monitor & m) {
        both(m);
        m.on_batch(run_of(0, 0, 4));
        m.on_batch(join(run_of(0, 4, 1), run_of(1, 0, 6)));
    };
    throws("no-mixed-batch", policy::barrier_greedy, mixed_batch, __LINE__);
    throws("none", policy::mixed, mixed_batch, __LINE__);

    const auto early = [](monitor & m) {
        both(m);
        m.on_batch(join(run_of(0, 0, 4), run_of(1, 0, 4)));
        m.on_sample(0);
    };
    throws("no-early-first-token", policy::barrier_fair, early, __LINE__);
    throws("none", policy::mixed, early, __LINE__);

    throws("own-prompt-first", policy::mixed, [](monitor & m) { both(m); m.on_batch(run_of(0, 0, 3)); m.on_sample(0); }, __LINE__);
    throws("one-owner", policy::barrier_serial, [](monitor & m) { both(m); m.on_batch(join(run_of(0, 0, 4), run_of(1, 0, 2))); }, __LINE__);
    throws("one-owner", policy::barrier_serial, [](monitor & m) { both(m); m.on_batch(run_of(0, 0, 3)); m.on_batch(run_of(1, 0, 6)); }, __LINE__);
    throws("none", policy::barrier_serial, [](monitor & m) { both(m); m.on_batch(run_of(0, 0, 4)); m.on_batch(run_of(1, 0, 6)); }, __LINE__);
    throws("closed-cohort", policy::barrier_fair, [](monitor & m) { m.on_admit(0, 0); m.on_batch(run_of(0, 0, 2)); m.on_admit(1, 1); }, __LINE__);
    throws("batch-limit", policy::mixed, [](monitor & m) { both(m); m.on_batch(join(run_of(0, 0, 4), run_of(1, 0, 5))); }, __LINE__);
    throws("batch-limit", policy::mixed, [](monitor & m) { m.on_batch({}); }, __LINE__);
    throws("contiguous-positions", policy::mixed, [](monitor & m) { both(m); m.on_batch(run_of(0, 1, 2)); }, __LINE__);
    throws("contiguous-positions", policy::mixed, [](monitor & m) { m.on_admit(0, 0); m.on_batch(run_of(1, 0, 2)); }, __LINE__);
    throws("contiguous-positions", policy::mixed, [](monitor & m) { m.on_admit(0, 0); m.on_admit(1, 0); }, __LINE__);
    throws("one-run-per-sequence", policy::mixed, [](monitor & m) {
        both(m);
        m.on_batch(join(join(run_of(0, 0, 2), run_of(1, 0, 2)), run_of(0, 2, 2)));
    }, __LINE__);
    throws("equal-work", policy::mixed, [](monitor & m) { m.on_admit(0, 0); m.on_batch(run_of(0, 0, 4)); m.on_sample(0); m.on_release(0); }, __LINE__);
    throws("equal-work", policy::mixed, [](monitor & m) { m.on_end({}); }, __LINE__);
}

void prompts_are_a_function_of_their_seed() {
    CHECK(prompt_text(1, 5, 40) == prompt_text(1, 5, 40));
    CHECK(prompt_text(1, 5, 40) != prompt_text(2, 5, 40));
    CHECK(prompt_text(1, 5, 40) != prompt_text(1, 6, 40));
    // a longer one continues the shorter one: prompts can be cut to length
    CHECK(prompt_text(3, 1, 80).rfind(prompt_text(3, 1, 40), 0) == 0);
}

} // namespace

int main() {
    mixed_puts_generated_tokens_first();
    greedy_fills_in_slot_order();
    fair_shares_the_room_and_wastes_none();
    serial_has_one_owner();
    a_cohort_drains_before_the_next_one();
    first_tokens_come_together();
    fair_is_max_min();
    every_schedule_keeps_every_invariant();
    planted_faults_are_found();
    each_invariant_fires_and_only_where_it_applies();
    prompts_are_a_function_of_their_seed();
    std::printf(n_failed == 0 ? "ok\n" : "%d checks failed\n", n_failed);
    return n_failed == 0 ? 0 : 1;
}

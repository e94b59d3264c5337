// Unit tests of the phase machine: one case per sentence of its contract. No model, no framework; exits 1 if a case fails.

#include "phase-machine.h"

#include <cstdio>
#include <string>
#include <vector>

using namespace phase;

namespace {

int n_failed = 0;

#define CHECK(condition)                                                              \
    do {                                                                              \
        if (!(condition)) {                                                           \
            std::printf("%s:%d: not true: %s\n", __func__, __LINE__, #condition);     \
            n_failed++;                                                               \
        }                                                                             \
    } while (0)

constexpr int64_t MS = 1000;

machine make(policy pol, size_t n_slots = 4, config cfg = {}) {
    cfg.pol = pol;
    machine m;
    m.configure(cfg, n_slots, 0);
    return m;
}

admission task(int slot, int64_t n_prompt = 10, task_kind kind = task_kind::sampling) {
    admission a;
    a.slot     = slot;
    a.kind     = kind;
    a.n_prompt = n_prompt;
    a.request  = "r" + std::to_string(slot);
    return a;
}

admission sized(int slot, int64_t n_prompt, int64_t n_final) {
    admission a = task(slot, n_prompt);
    a.n_final   = n_final;
    return a;
}

admission gathering(int slot, int64_t gather_us) {
    admission a = task(slot);
    a.gather_us = gather_us;
    return a;
}

void admit(machine & m, int slot, int64_t now) { m.on_admit({ task(slot) }, now); m.advance(now); }

// slot 0 generates, having stepped once
machine generating(policy pol, config cfg = {}) {
    machine m = make(pol, 4, cfg);
    admit(m, 0, 0);
    m.on_prompt_done(0, 0);
    m.advance(0);
    m.take_opened();
    m.on_generate_step(0, 11, 2);
    return m;
}

std::vector<std::string> kinds(const machine & m, uint64_t since = 0) {
    std::vector<std::string> res;
    for (const auto & t : m.since(since).events) {
        res.push_back(name(t.event));
    }
    return res;
}

void names_are_the_wire_format() {
    CHECK(std::string(name(policy::drain)) == "drain");
    CHECK(std::string(name(engine::generate)) == "generate");
    CHECK(std::string(name(member::paused)) == "paused");
    CHECK(std::string(name(event_kind::resume)) == "resume");
    CHECK(parse_policy("yield") == policy::yield);
    CHECK(parse_policy("mixed") == policy::mixed);
    CHECK(!parse_policy("Drain"));
    CHECK(!parse_policy(""));
    CHECK(config().pol == policy::drain);
    CHECK(config().yield_us == 2000 * MS);
    CHECK(config().admit_us == 0);
}

void one_request_runs_through() {
    machine m = make(policy::drain);
    CHECK(m.state() == engine::idle && !m.wake_at());
    admit(m, 2, 5);
    CHECK(m.state() == engine::prefill && m.state(2) == member::prefill && !m.sealed());
    CHECK(m.can_prefill(2) && !m.can_generate(2));
    m.on_prompt_done(2, 20);
    CHECK(m.state(2) == member::ready && m.sealed());
    CHECK(!m.can_prefill(2) && !m.can_generate(2)); // it opens at the next advance, not before
    m.advance(30);
    CHECK(m.state() == engine::generate && m.can_generate(2) && !m.can_prefill(2));
    const auto opened = m.take_opened();
    CHECK(opened.size() == 1 && opened[0].slot == 2 && !opened[0].resumed && opened[0].waited_us == 10);
    CHECK(m.take_opened().empty());
    m.on_release(2, 7, 50);
    m.settle(50);
    CHECK(m.state() == engine::idle && m.state(2) == member::none);
    const std::vector<std::string> wanted = { "admit", "admit", "ready", "seal", "open", "release", "idle" };
    CHECK(kinds(m) == wanted);
    CHECK(m.since(0).events[5].tokens == 7 && m.since(0).events[5].request == "r2");
}

void an_event_changes_no_phase() {
    machine m = make(policy::drain);
    m.on_admit({ task(0) }, 0);
    CHECK(m.state() == engine::idle && m.state(0) == member::queued);
    m.advance(0);
    m.on_prompt_done(0, 0);
    CHECK(m.state() == engine::prefill);
    m.on_release(0, 0, 0);
    CHECK(m.state() == engine::prefill);
    m.advance(0);
    CHECK(m.state() == engine::idle);
}

void nobody_starts_before_all_are_ready() {
    machine m = make(policy::drain);
    admit(m, 0, 0);
    admit(m, 1, 0);
    CHECK(m.cohort(0) == m.cohort(1));
    m.on_prompt_done(1, 10);
    m.advance(10);
    CHECK(m.state() == engine::prefill && m.state(1) == member::ready && !m.can_generate(1));
    CHECK(m.take_opened().empty());
    m.on_prompt_done(0, 90);
    m.advance(90);
    CHECK(m.can_generate(0) && m.can_generate(1));
    CHECK(m.view(1, 90).wait_us == 80 && m.view(0, 90).wait_us == 0);
}

void the_first_ready_member_seals() {
    machine m = make(policy::drain);
    admit(m, 0, 0);
    admit(m, 1, 1);
    CHECK(m.state(1) == member::prefill);
    m.on_prompt_done(0, 2);
    admit(m, 2, 3);
    CHECK(m.state(2) == member::queued && !m.can_prefill(2) && m.cohort(2) == 0);
    m.on_release(0, 0, 4); // the seal outlives whoever caused it
    m.advance(4);
    CHECK(m.sealed());
    admit(m, 3, 5);
    CHECK(m.state(3) == member::queued);
}

void drain_lets_nobody_in_before_the_last_leaves() {
    machine m = generating(policy::drain);
    admit(m, 1, 10);
    for (int64_t now = 10; now < 100000 * MS; now += 10000 * MS) {
        m.advance(now);
        CHECK(m.state(1) == member::queued && m.can_generate(0));
    }
    m.on_release(0, 3, 100000 * MS);
    m.advance(100000 * MS);
    CHECK(m.can_prefill(1) && m.cohort(1) == 2);
    CHECK(m.view(1, 100000 * MS).queue_us == 100000 * MS - 10);
}

void members_that_leave_release_the_barrier() {
    machine m = make(policy::drain);
    admit(m, 0, 0);
    admit(m, 1, 0);
    m.on_prompt_done(0, 1);
    m.on_release(1, 0, 2); // the last one that still processes its prompt
    m.advance(2);
    CHECK(m.can_generate(0));
    m.on_release(0, 0, 3);
    m.on_release(0, 0, 3); // twice does nothing
    m.advance(3);
    CHECK(m.state() == engine::idle);
}

void a_cohort_that_vanishes_makes_room_at_once() {
    machine m = make(policy::drain);
    admit(m, 0, 0);
    m.on_prompt_done(0, 1);
    admit(m, 1, 2);
    m.on_release(0, 0, 3);
    m.advance(3);
    CHECK(m.can_prefill(1));
}

void prefill_only_members_never_seal() {
    machine m = make(policy::drain, 2);
    m.on_admit({ task(0, 10, task_kind::prefill_only) }, 0);
    m.advance(0);
    m.on_prompt_done(0, 1);
    CHECK(!m.sealed() && m.state(0) == member::prefill);
    m.on_release(0, 0, 1);
    admit(m, 1, 1);
    m.advance(1);
    CHECK(m.state(1) == member::prefill);
    m.on_prompt_done(1, 2);
    m.advance(2);
    m.on_admit({ task(0, 10, task_kind::prefill_only) }, 3);
    m.advance(3);
    CHECK(m.state(0) == member::queued); // it waits for a cohort that drains
}

void prefill_only_newcomers_cannot_hold_a_cohort_open() {
    machine m = make(policy::drain, 3);
    admit(m, 0, 0);
    int n_let_in = 0;
    for (int i = 0; i < 10 && n_let_in == i; i++) {
        m.on_admit({ task(1, 5, task_kind::prefill_only) }, i);
        m.advance(i);
        if (m.state(1) == member::prefill) {
            n_let_in++;
            m.on_prompt_done(1, i);
            m.on_release(1, 0, i);
        }
    }
    CHECK(n_let_in == 3);
    CHECK(m.state(1) == member::queued);
}

void a_group_is_indivisible() {
    machine m = make(policy::drain);
    m.on_admit({ task(0), task(1), task(2) }, 0);
    m.advance(0);
    CHECK(m.count(member::prefill) == 3);
    m = generating(policy::drain);
    m.on_admit({ task(1), task(2) }, 1);
    m.on_release(0, 1, 2);
    m.advance(2);
    CHECK(m.state(1) == member::prefill && m.state(2) == member::prefill && m.cohort(1) == m.cohort(2));
}

void yield_waits_for_the_quantum_and_one_step() {
    config cfg;
    cfg.yield_us = 100;
    machine m = make(policy::yield, 4, cfg);
    admit(m, 0, 0);
    m.on_prompt_done(0, 1000);
    m.advance(1000);
    admit(m, 1, 1010);
    m.advance(1109);
    CHECK(m.state(0) == member::generate && !m.yield_due(1109)); // max(oldest admit, opening) + quantum = 1110
    m.advance(1110);
    CHECK(m.yield_due(1110) && m.state(0) == member::generate && !m.stepped(0)); // no step was made yet
    m.on_generate_step(0, 11, 2);
    CHECK(m.stepped(0));
    m.advance(1111);
    CHECK(m.state(0) == member::paused && m.can_prefill(1) && !m.can_generate(0) && !m.sealed());
    CHECK(m.sums(1111).n_yield == 1);
    admit(m, 2, 1112); // the yielded cohort is open
    CHECK(m.state(2) == member::prefill);
    m.on_prompt_done(1, 1200);
    m.on_prompt_done(2, 1250);
    m.advance(1300);
    CHECK(m.can_generate(0) && m.can_generate(1) && m.can_generate(2));
    const auto opened = m.take_opened();
    CHECK(opened.size() == 3);
    CHECK(opened[0].resumed && opened[0].waited_us == 189 && !opened[1].resumed && opened[1].waited_us == 100);
    CHECK(m.view(0, 1300).paused_us == 189);
}

void a_new_quantum_begins_with_each_opening() {
    config cfg;
    cfg.yield_us = 100;
    machine m = generating(policy::yield, cfg);
    admit(m, 1, 0);
    m.advance(100);
    CHECK(m.state(0) == member::paused);
    admit(m, 2, 101);
    m.on_prompt_done(1, 110);
    admit(m, 3, 111); // sealed
    m.on_prompt_done(2, 400);
    m.advance(400);
    for (const int s : { 0, 1, 2 }) {
        m.on_generate_step(s, 12, 3);
    }
    m.advance(499); // it waited for 388, but generation ran for 99 only
    CHECK(m.state() == engine::generate);
    m.advance(500);
    CHECK(m.state() == engine::prefill && m.can_prefill(3) && m.count(member::paused) == 3);
}

void a_paused_member_may_leave() {
    config cfg;
    cfg.yield_us = 0;
    machine m = generating(policy::yield, cfg);
    admit(m, 1, 1);
    CHECK(m.state(0) == member::paused);
    m.on_release(0, 2, 2);
    m.on_release(1, 0, 3);
    m.advance(3);
    CHECK(m.state() == engine::idle && m.count(member::none) == 4);
}

void yield_keeps_the_pool() {
    config cfg;
    cfg.yield_us    = 0;
    cfg.pool_tokens = 1024;
    machine m = make(policy::yield, 4, cfg);
    m.on_admit({ sized(0, 100, 400), sized(1, 100, 400) }, 0);
    m.advance(0);
    m.on_prompt_done(0, 1);
    m.on_prompt_done(1, 1);
    m.advance(1);
    m.on_generate_step(0, 300, 200);
    m.on_generate_step(1, 300, 200);
    m.on_admit({ sized(2, 700, 720) }, 2);
    m.advance(2);
    CHECK(m.state(2) == member::queued && m.count(member::generate) == 2); // 300 + 300 + 700 > 1024
    m.on_admit({ sized(3, 10, 20) }, 3);
    m.advance(3);
    CHECK(m.state(3) == member::queued); // it would fit, but may not overtake
    m.on_release(0, 300, 4);
    m.advance(4);
    CHECK(m.state(2) == member::queued); // 400 + 720 > 1024
    m.on_release(1, 300, 5);
    m.advance(5);
    CHECK(m.state(2) == member::prefill && m.state(3) == member::prefill);
}

void yield_takes_as_many_as_fit_in_order() {
    config cfg;
    cfg.yield_us    = 0;
    cfg.pool_tokens = 1000;
    machine m = make(policy::yield, 4, cfg);
    m.on_admit({ sized(0, 100, 200) }, 0);
    m.advance(0);
    m.on_prompt_done(0, 1);
    m.advance(1);
    m.on_admit({ sized(3, 500, 600) }, 2);
    m.on_admit({ sized(1, 300, 400) }, 3);
    m.on_generate_step(0, 110, 10);
    m.advance(4);
    CHECK(m.state(3) == member::prefill && m.state(1) == member::queued && m.state(0) == member::paused);
    m.on_admit({ sized(2, 10, 20) }, 5);
    m.advance(5);
    CHECK(m.state(2) == member::queued); // behind the one that waits for room
}

void no_room_sends_back_to_the_queue() {
    config cfg;
    cfg.yield_us = 0;
    machine m = generating(policy::yield, cfg);
    admit(m, 1, 1);
    CHECK(m.state(0) == member::paused);
    m.on_no_room(1, 2);
    CHECK(m.state(1) == member::queued);
    m.advance(2);
    CHECK(m.state(0) == member::generate); // the barrier opens for the rest
    m.on_generate_step(0, 12, 3);
    m.advance(1000000);
    CHECK(m.state(0) == member::generate); // no second yield for the same one
    m.on_release(0, 3, 1000001);
    m.advance(1000001);
    CHECK(m.can_prefill(1));
}

void an_oversized_task_still_gets_its_turn() {
    config cfg;
    cfg.pool_tokens = 100;
    machine m = make(policy::drain, 2, cfg);
    m.on_admit({ sized(0, 150, 200) }, 0);
    m.advance(0);
    CHECK(m.can_prefill(0)); // the pool gets no emptier
}

void the_admit_window_is_a_timed_wait() {
    config cfg;
    cfg.admit_us = 50;
    machine m = make(policy::drain, 3, cfg);
    m.on_admit({ task(0) }, 1000);
    m.advance(1000);
    CHECK(m.state(0) == member::queued && m.wake_at() == 1050);
    m.on_admit({ task(1) }, 1020);
    m.advance(1020);
    CHECK(m.wake_at() == 1070); // the latest over the queued members
    m.advance(1069);
    CHECK(m.state(0) == member::queued);
    m.advance(1070);
    CHECK(m.can_prefill(0) && m.can_prefill(1) && !m.wake_at());
}

void the_window_ends_when_no_slot_is_free() {
    config cfg;
    cfg.admit_us = 1000000;
    machine m = make(policy::drain, 2, cfg);
    m.on_admit({ task(0) }, 0);
    m.advance(0);
    CHECK(m.wake_at().has_value());
    m.on_admit({ task(1) }, 1);
    m.advance(1);
    CHECK(m.can_prefill(0) && m.can_prefill(1));
}

void the_window_counts_from_the_drain() {
    config cfg;
    cfg.admit_us = 50;
    machine m = make(policy::drain, 4, cfg);
    m.on_admit({ gathering(0, 0) }, 0);
    m.advance(0);
    m.on_prompt_done(0, 1);
    m.advance(1);
    m.on_admit({ task(1) }, 2);
    m.on_release(0, 1, 500);
    m.advance(500);
    CHECK(m.state(1) == member::queued && m.wake_at() == 550);
    m.advance(550);
    CHECK(m.can_prefill(1));
}

void the_hint_replaces_the_window() {
    config cfg;
    cfg.admit_us = 1000;
    machine m = make(policy::drain, 4, cfg);
    m.on_admit({ gathering(0, 0) }, 100);
    m.advance(100);
    CHECK(m.can_prefill(0)); // a lone request with hint 0 starts at once
    m = make(policy::drain, 4, config());
    m.on_admit({ gathering(0, 20) }, 100);
    m.advance(100);
    CHECK(m.wake_at() == 120);
    m.on_release(0, 0, 110); // cancelled while the window is open
    m.advance(110);
    CHECK(!m.wake_at() && m.state() == engine::idle);
}

void mixed_gates_nothing() {
    machine m = make(policy::mixed);
    admit(m, 0, 0);
    m.on_prompt_done(0, 1);
    m.advance(1);
    admit(m, 1, 2);
    CHECK(m.can_prefill(1) && m.can_generate(0) && m.can_prefill(3) && m.can_generate(3));
    CHECK(m.state(0) == member::generate && m.state(1) == member::prefill && !m.sealed());
    m.on_prompt_done(1, 3);
    CHECK(m.state(1) == member::generate && m.state() == engine::generate);
    m.on_release(0, 1, 4);
    m.on_release(1, 1, 4);
    m.advance(4);
    CHECK(m.state() == engine::idle);
    CHECK(m.sums(4).wait_us == 0 && m.sums(4).queue_us == 0);
}

void sums_equal_the_intervals() {
    config cfg;
    cfg.yield_us = 30;
    machine m = make(policy::yield, 4, cfg);
    admit(m, 0, 100);
    m.on_prompt_done(0, 150);
    m.advance(160);                   // prefill 100..160, wait 150..160
    admit(m, 1, 170);
    m.on_generate_step(0, 11, 2);
    m.advance(200);                   // generate 160..200, queue 170..200, a yield
    m.on_prompt_done(1, 260);
    m.advance(260);                   // prefill 200..260, pause 200..260
    m.on_release(0, 5, 300);
    m.on_release(1, 5, 310);
    m.settle(310);                    // generate 260..310
    const totals t = m.sums(400);
    CHECK(t.prefill_us == 120 && t.generate_us == 90 && t.wait_us == 10 && t.queue_us == 30 && t.paused_us == 60);
    CHECK(t.n_prefill == 2 && t.n_generate == 2 && t.n_yield == 1);
}

void running_intervals_are_included() {
    machine m = make(policy::drain);
    admit(m, 0, 100);
    CHECK(m.sums(150).prefill_us == 50);
    m.on_prompt_done(0, 150);
    CHECK(m.sums(190).wait_us == 40 && m.view(0, 190).wait_us == 40);
    m.advance(200);
    m.on_admit({ task(1) }, 210);
    CHECK(m.sums(250).generate_us == 50 && m.sums(250).queue_us == 40);
}

void the_ring_counts_what_it_lost() {
    machine m = make(policy::drain, 1);
    for (int i = 0; i < 500; i++) {
        admit(m, 0, i);
        m.on_release(0, 0, i);
        m.advance(i);
    }
    const uint64_t last = m.seq();
    CHECK(last == 2000); // admit twice, release, idle
    const transitions all = m.since(0);
    CHECK(all.events.size() == machine::ring_size && all.lost == last - machine::ring_size && all.seq == last);
    CHECK(all.events.front().seq == all.lost + 1 && all.events.back().seq == last);
    for (size_t i = 1; i < all.events.size(); i++) {
        CHECK(all.events[i].seq == all.events[i - 1].seq + 1 && all.events[i].t_us >= all.events[i - 1].t_us);
    }
    CHECK(m.since(last).events.empty() && m.since(last).lost == 0);
    CHECK(m.since(last + 1000).events.empty() && m.since(last + 1000).lost == 0);
    CHECK(m.since(last - 1).events.size() == 1);
}

void numbers_go_on_across_a_reload() {
    machine m = generating(policy::drain);
    const uint64_t seq     = m.seq();
    const uint64_t cohort  = m.cohort();
    m.on_release(0, 1, 500);
    m.settle(500);
    const auto before = m.sums(500);
    m.configure(m.settings(), 4, 9000);
    CHECK(m.seq() >= seq && m.cohort() == cohort);
    CHECK(m.sums(9000).generate_us == before.generate_us && m.sums(9000).n_prefill == before.n_prefill);
    admit(m, 0, 9001);
    CHECK(m.cohort(0) == cohort + 1);
    CHECK(m.since(0).lost == 0 && m.since(0).events.front().seq == 1);
}

} // namespace

int main() {
    names_are_the_wire_format();
    one_request_runs_through();
    an_event_changes_no_phase();
    nobody_starts_before_all_are_ready();
    the_first_ready_member_seals();
    drain_lets_nobody_in_before_the_last_leaves();
    members_that_leave_release_the_barrier();
    a_cohort_that_vanishes_makes_room_at_once();
    prefill_only_members_never_seal();
    prefill_only_newcomers_cannot_hold_a_cohort_open();
    a_group_is_indivisible();
    yield_waits_for_the_quantum_and_one_step();
    a_new_quantum_begins_with_each_opening();
    a_paused_member_may_leave();
    yield_keeps_the_pool();
    yield_takes_as_many_as_fit_in_order();
    no_room_sends_back_to_the_queue();
    an_oversized_task_still_gets_its_turn();
    the_admit_window_is_a_timed_wait();
    the_window_ends_when_no_slot_is_free();
    the_window_counts_from_the_drain();
    the_hint_replaces_the_window();
    mixed_gates_nothing();
    sums_equal_the_intervals();
    running_intervals_are_included();
    the_ring_counts_what_it_lost();
    numbers_go_on_across_a_reload();
    std::printf(n_failed == 0 ? "ok\n" : "%d checks failed\n", n_failed);
    return n_failed == 0 ? 0 : 1;
}

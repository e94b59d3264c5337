#include "phase-machine.h"

#include <algorithm>

namespace phase {

const char * name(policy p) {
    switch (p) {
        case policy::mixed: return "mixed";
        case policy::drain: return "drain";
        case policy::yield: return "yield";
    }
    return "?";
}

const char * name(engine e) {
    switch (e) {
        case engine::idle:     return "idle";
        case engine::prefill:  return "prefill";
        case engine::generate: return "generate";
    }
    return "?";
}

const char * name(member m) {
    switch (m) {
        case member::none:     return "none";
        case member::queued:   return "queued";
        case member::prefill:  return "prefill";
        case member::ready:    return "ready";
        case member::generate: return "generate";
        case member::paused:   return "paused";
    }
    return "?";
}

const char * name(event_kind e) {
    switch (e) {
        case event_kind::admit:   return "admit";
        case event_kind::seal:    return "seal";
        case event_kind::ready:   return "ready";
        case event_kind::open:    return "open";
        case event_kind::pause:   return "pause";
        case event_kind::resume:  return "resume";
        case event_kind::release: return "release";
        case event_kind::idle:    return "idle";
    }
    return "?";
}

std::optional<policy> parse_policy(const std::string & text) {
    for (const policy p : { policy::mixed, policy::drain, policy::yield }) {
        if (text == name(p)) {
            return p;
        }
    }
    return std::nullopt;
}

void machine::configure(const config & settings, size_t n_slots, int64_t now) {
    cfg = settings;
    slots.assign(n_slots, slot_state());
    is_sealed   = false;
    has_blocked = false;
    n_only      = 0;
    enter(engine::idle, now);
}

//
// events
//

void machine::on_admit(const std::vector<admission> & group, int64_t now) {
    const bool joins = may_join(group);
    const uint64_t id = ++n_groups;

    for (const auto & a : group) {
        slot_state & s = slots.at(a.slot);
        s = slot_state();
        s.kind      = a.kind;
        s.group     = id;
        s.t_admit   = now;
        s.gather_us = a.gather_us < 0 ? cfg.admit_us : a.gather_us;
        s.n_prompt  = a.n_prompt;
        s.n_shared  = a.n_shared;
        s.n_final   = a.n_final;
        s.request   = a.request;
        if (joins) {
            join(a.slot, now);
        } else {
            queue(a.slot, now);
        }
    }
    // somebody who arrives after one for whom there is no room may not overtake him
    has_blocked = has_blocked || (!joins && eng == engine::prefill && !is_sealed && group.front().kind == task_kind::sampling);
}

void machine::on_prompt_done(int slot, int64_t now) {
    slot_state & s = slots.at(slot);
    if (s.state != member::prefill || s.kind != task_kind::sampling) {
        return;
    }
    s.n_held = s.n_prompt - s.n_shared;
    note(event_kind::ready, slot, s.cohort, s.n_prompt, now);
    if (!exclusive()) {
        s.state = member::generate;
        note(event_kind::open, slot, s.cohort, 1, now);
        follow_mixed(now);
        return;
    }
    s.state   = member::ready;
    s.t_state = now;
    if (!is_sealed) {
        is_sealed = true;
        note(event_kind::seal, slot, cohort_id, count(member::prefill) + count(member::ready), now);
    }
}

void machine::on_generate_step(int slot, int64_t n_held, int64_t n_generated) {
    slot_state & s = slots.at(slot);
    if (s.state != member::generate) {
        return;
    }
    s.has_stepped = true;
    s.n_held      = std::max<int64_t>(0, n_held - s.n_shared);
    s.n_generated = n_generated;
}

void machine::on_release(int slot, int64_t n_generated, int64_t now) {
    slot_state & s = slots.at(slot);
    if (s.state == member::none) {
        return;
    }
    end_wait(s, now);
    note(event_kind::release, slot, s.cohort, n_generated, now);
    s = slot_state();
    if (!exclusive()) {
        follow_mixed(now);
    }
}

void machine::on_no_room(int slot, int64_t now) {
    slot_state & s = slots.at(slot);
    if (s.state != member::prefill) {
        return;
    }
    s.no_yield  = true;
    has_blocked = true;
    queue(slot, now);
}

//
// transitions
//

void machine::advance(int64_t now) {
    if (!exclusive()) {
        follow_mixed(now);
        return;
    }
    while (step(now)) {
    }
}

// one transition; false if none is due
bool machine::step(int64_t now) {
    switch (eng) {
        case engine::prefill:
            if (count(member::prefill) > 0) {
                return false;
            }
            if (count(member::ready) + count(member::paused) > 0) {
                open(now);
            } else {
                become_idle(now);
            }
            return true;
        case engine::generate:
            if (count(member::generate) > 0) {
                return try_yield(now);
            }
            become_idle(now);
            return true;
        case engine::idle:
            {
                const auto t_wake = wake_at();
                if (count(member::queued) == 0 || (t_wake && now < *t_wake)) {
                    return false;
                }
                start_cohort(select(false), now);
                return true;
            }
    }
    return false;
}

void machine::settle(int64_t now) {
    if (exclusive() && eng != engine::idle && count(member::none) + count(member::queued) == slots.size()) {
        become_idle(now);
    }
}

void machine::open(int64_t now) {
    enter(engine::generate, now);
    done.n_generate++;
    note(event_kind::open, -1, cohort_id, count(member::ready) + count(member::paused), now);
    for (size_t i = 0; i < slots.size(); i++) {
        slot_state & s = slots[i];
        if (s.state != member::ready && s.state != member::paused) {
            continue;
        }
        s.is_opened  = true;
        s.is_resumed = s.state == member::paused;
        s.waited_us  = now - s.t_state;
        end_wait(s, now);
        s.state       = member::generate;
        s.has_stepped = false;
        if (s.is_resumed) {
            note(event_kind::resume, (int) i, s.cohort, s.n_held, now);
        }
    }
}

void machine::become_idle(int64_t now) {
    enter(engine::idle, now);
    note(event_kind::idle, -1, cohort_id, 0, now);
}

bool machine::yield_due(int64_t now) const {
    if (cfg.pol != policy::yield || eng != engine::generate) {
        return false;
    }
    const auto order = queued_in_order();
    if (order.empty()) {
        return false;
    }
    int64_t t_oldest = now;
    for (const int i : order) {
        t_oldest = std::min(t_oldest, slots[i].t_admit);
    }
    return now - std::max(t_oldest, t_engine) >= cfg.yield_us;
}

bool machine::all_stepped() const {
    return std::none_of(slots.begin(), slots.end(), [](const slot_state & s) { return s.state == member::generate && !s.has_stepped; });
}

bool machine::yield_blocked(int64_t now) const {
    return yield_due(now) && all_stepped() && select(true).empty();
}

bool machine::try_yield(int64_t now) {
    if (!yield_due(now) || !all_stepped()) {
        return false;
    }
    const auto members = select(true);
    if (members.empty()) {
        return false;
    }
    done.n_yield++;
    for (size_t i = 0; i < slots.size(); i++) {
        slot_state & s = slots[i];
        if (s.state == member::generate) {
            s.state     = member::paused;
            s.t_state   = now;
            s.is_opened = false;
            note(event_kind::pause, (int) i, s.cohort, s.n_held, now);
        }
    }
    start_cohort(members, now);
    return true;
}

void machine::start_cohort(const std::vector<int> & members, int64_t now) {
    enter(engine::prefill, now);
    done.n_prefill++;
    cohort_id++;
    is_sealed   = false;
    n_only      = 0;
    has_blocked = members.size() < count(member::queued);
    for (const int i : members) {
        join(i, now);
    }
}

void machine::join(int slot, int64_t now) {
    slot_state & s = slots[slot];
    if (!exclusive() && eng == engine::idle) {
        cohort_id++;
    }
    end_wait(s, now);
    s.state  = member::prefill;
    s.cohort = cohort_id;
    n_only  += s.kind == task_kind::prefill_only ? 1 : 0;
    note(event_kind::admit, slot, s.cohort, s.n_prompt, now);
    if (!exclusive()) {
        follow_mixed(now);
    }
}

void machine::queue(int slot, int64_t now) {
    slot_state & s = slots[slot];
    s.state   = member::queued;
    s.cohort  = 0;
    s.t_state = now;
    note(event_kind::admit, slot, 0, s.n_prompt, now);
}

// books the time of the wait that ends, the caller sets the next state
void machine::end_wait(slot_state & s, int64_t now) {
    const int64_t dt = now - s.t_state;
    switch (s.state) {
        case member::queued: s.queue_us  += dt; done.queue_us  += dt; break;
        case member::ready:  s.wait_us   += dt; done.wait_us   += dt; break;
        case member::paused: s.paused_us += dt; done.paused_us += dt; break;
        default: break;
    }
}

void machine::enter(engine next, int64_t now) {
    const int64_t dt = now - t_engine;
    done.prefill_us  += eng == engine::prefill  ? dt : 0;
    done.generate_us += eng == engine::generate ? dt : 0;
    eng      = next;
    t_engine = now;
    if (next != engine::prefill) {
        is_sealed   = false;
        has_blocked = false;
    }
}

// under `mixed` the engine's phase only describes: prefill as long as any prompt is unfinished
void machine::follow_mixed(int64_t now) {
    const engine next = count(member::prefill)  > 0 ? engine::prefill
                      : count(member::generate) > 0 ? engine::generate : engine::idle;
    if (next == eng) {
        return;
    }
    enter(next, now);
    done.n_prefill  += next == engine::prefill  ? 1 : 0;
    done.n_generate += next == engine::generate ? 1 : 0;
    if (next == engine::idle) {
        note(event_kind::idle, -1, cohort_id, 0, now);
    }
}

std::vector<opening> machine::take_opened() {
    std::vector<opening> res;
    for (size_t i = 0; i < slots.size(); i++) {
        slot_state & s = slots[i];
        if (s.is_opened) {
            s.is_opened = false;
            res.push_back({ (int) i, s.is_resumed, s.waited_us });
        }
    }
    return res;
}

//
// who enters a cohort
//

std::vector<int> machine::queued_in_order() const {
    std::vector<int> res;
    for (size_t i = 0; i < slots.size(); i++) {
        if (slots[i].state == member::queued) {
            res.push_back((int) i);
        }
    }
    std::stable_sort(res.begin(), res.end(), [this](int a, int b) { return slots[a].group < slots[b].group; });
    return res;
}

// The queued members that enter the next cohort: whole groups in order of arrival, as far as the pool reaches. Nobody overtakes one
// for whom there is no room, so that he cannot starve. An idle engine takes at least one group: the pool gets no emptier.
std::vector<int> machine::select(bool yielded) const {
    const auto order = queued_in_order();

    std::vector<int> res;
    int64_t used = need_running(yielded);
    for (size_t i = 0; i < order.size(); ) {
        size_t  end  = i;
        int64_t need = 0;
        bool    may  = true;
        for (; end < order.size() && slots[order[end]].group == slots[order[i]].group; end++) {
            need += need_of(slots[order[end]], yielded);
            may  &= !(yielded && slots[order[end]].no_yield);
        }
        const bool first = res.empty() && !yielded;
        if (!first && (!may || (cfg.pool_tokens > 0 && used + need > cfg.pool_tokens))) {
            break;
        }
        used += need;
        res.insert(res.end(), order.begin() + i, order.begin() + end);
        i = end;
    }
    return res;
}

// tokens that a sequence needs: up to its end if that is known and asked for, otherwise for one more step
int64_t machine::need_of(const slot_state & s, bool whole) const {
    const int64_t held = std::max(s.n_held, s.n_prompt - s.n_shared);
    return whole && s.n_final > 0 ? std::max(held, s.n_final - s.n_shared) : held + 1;
}

int64_t machine::need_running(bool whole) const {
    int64_t res = 0;
    for (const auto & s : slots) {
        if (s.state != member::none && s.state != member::queued) {
            res += need_of(s, whole);
        }
    }
    return res;
}

bool machine::may_join(const std::vector<admission> & group) const {
    if (!exclusive()) {
        return true;
    }
    if (eng != engine::prefill || is_sealed || has_blocked) {
        return false;
    }
    // an endless stream of prefill-only tasks would keep the cohort open for ever
    size_t  n_new = 0;
    int64_t need  = 0;
    const bool yielded = count(member::paused) > 0;
    for (const auto & a : group) {
        slot_state s;
        s.n_prompt = a.n_prompt;
        s.n_shared = a.n_shared;
        s.n_final  = a.n_final;
        need  += need_of(s, yielded);
        n_new += a.kind == task_kind::prefill_only ? 1 : 0;
    }
    if (n_new > 0 && n_only + n_new > slots.size()) {
        return false;
    }
    return cfg.pool_tokens == 0 || need_running(yielded) + need <= cfg.pool_tokens;
}

//
// queries
//

bool machine::can_prefill(int slot) const {
    return !exclusive() || (eng == engine::prefill && slots.at(slot).state == member::prefill);
}

bool machine::can_generate(int slot) const {
    return !exclusive() || (eng == engine::generate && slots.at(slot).state == member::generate);
}

std::optional<int64_t> machine::wake_at() const {
    if (!exclusive() || eng != engine::idle || count(member::queued) == 0 || count(member::none) == 0) {
        return std::nullopt;
    }
    int64_t res = 0;
    for (const auto & s : slots) {
        if (s.state == member::queued) {
            res = std::max(res, std::max(s.t_admit, t_engine) + s.gather_us);
        }
    }
    return res;
}

bool machine::stepped(int slot) const {
    return slots.at(slot).has_stepped;
}

size_t machine::count(member m) const {
    return std::count_if(slots.begin(), slots.end(), [m](const slot_state & s) { return s.state == m; });
}

slot_view machine::view(int slot, int64_t now) const {
    const slot_state & s = slots.at(slot);
    slot_view res;
    res.state     = s.state;
    res.cohort    = s.cohort;
    res.queue_us  = s.queue_us  + (s.state == member::queued ? now - s.t_state : 0);
    res.wait_us   = s.wait_us   + (s.state == member::ready  ? now - s.t_state : 0);
    res.paused_us = s.paused_us + (s.state == member::paused ? now - s.t_state : 0);
    res.request   = s.request;
    return res;
}

totals machine::sums(int64_t now) const {
    totals res = done;
    res.prefill_us  += eng == engine::prefill  ? now - t_engine : 0;
    res.generate_us += eng == engine::generate ? now - t_engine : 0;
    for (const auto & s : slots) {
        const int64_t dt = now - s.t_state;
        res.queue_us  += s.state == member::queued ? dt : 0;
        res.wait_us   += s.state == member::ready  ? dt : 0;
        res.paused_us += s.state == member::paused ? dt : 0;
    }
    return res;
}

transitions machine::since(uint64_t seq) const {
    transitions res;
    res.seq = last_seq;
    if (seq >= last_seq) {
        return res;
    }
    const uint64_t first = last_seq - std::min<uint64_t>(last_seq, ring.size()) + 1; // the oldest that the ring holds
    res.lost = seq + 1 < first ? first - seq - 1 : 0;
    for (uint64_t i = std::max(seq + 1, first); i <= last_seq; i++) {
        res.events.push_back(ring[i % ring_size]);
    }
    return res;
}

void machine::note(event_kind event, int slot, uint64_t cohort, int64_t tokens, int64_t now) {
    last_seq++;
    if (ring.empty()) {
        ring.resize(ring_size);
    }
    transition & t = ring[last_seq % ring_size];
    t.seq     = last_seq;
    t.t_us    = now;
    t.event   = event;
    t.slot    = slot;
    t.cohort  = cohort;
    t.tokens  = tokens;
    t.request = slot >= 0 ? slots[slot].request : std::string();
}

const char * machine::check() const {
    if (!exclusive()) {
        return nullptr;
    }
    for (const auto & s : slots) {
        switch (s.state) {
            case member::prefill:
                if (eng != engine::prefill) {
                    return "a slot processes its prompt outside of the prefill phase";
                }
                if (s.cohort != cohort_id) {
                    return "a slot processes its prompt for an old cohort";
                }
                break;
            case member::ready:
                if (eng != engine::prefill || !is_sealed) {
                    return "a slot is ready outside of a sealed prefill phase";
                }
                break;
            case member::paused:
                if (eng != engine::prefill || cfg.pol != policy::yield) {
                    return "a slot is paused outside of a yielded prefill phase";
                }
                break;
            case member::generate:
                if (eng != engine::generate) {
                    return "a slot generates outside of the generate phase";
                }
                break;
            case member::queued:
            case member::none:
                break;
        }
    }
    return nullptr;
}

} // namespace phase

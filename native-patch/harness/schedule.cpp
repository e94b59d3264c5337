#include "schedule.h"

#include <algorithm>

namespace harness {

const char * name(policy p) {
    switch (p) {
        case policy::mixed:          return "mixed";
        case policy::barrier_greedy: return "barrier-greedy";
        case policy::barrier_fair:   return "barrier-fair";
        case policy::barrier_serial: return "barrier-serial";
    }
    return "?";
}

const char * name(phase p) {
    switch (p) {
        case phase::prefill:  return "prefill";
        case phase::generate: return "generate";
        case phase::mixed:    return "mixed";
    }
    return "?";
}

const std::vector<policy> & all_policies() {
    static const std::vector<policy> all = { policy::mixed, policy::barrier_greedy, policy::barrier_fair, policy::barrier_serial };
    return all;
}

std::optional<policy> parse_policy(const std::string & text) {
    for (policy p : all_policies()) {
        if (text == name(p)) {
            return p;
        }
    }
    return std::nullopt;
}

int step::n_prompt() const {
    int n = 0;
    for (const chunk & c : chunks) {
        n += c.prompt ? c.n : 0;
    }
    return n;
}

int step::n_generated() const {
    int n = 0;
    for (const chunk & c : chunks) {
        n += c.prompt ? 0 : c.n;
    }
    return n;
}

scheduler::scheduler(const plan & p) : what(p), requests(p.lengths.size()), owner(p.slots, -1) {}

int scheduler::rest(int request) const {
    return what.lengths[request] - requests[request].prompt;
}

bool scheduler::prompts_left() const {
    return std::any_of(owner.begin(), owner.end(), [&](int r) { return r >= 0 && rest(r) > 0; });
}

std::vector<admission> scheduler::admit() {
    std::vector<admission> result;
    const bool idle = std::all_of(owner.begin(), owner.end(), [](int r) { return r < 0; });
    if (exclusive() && !idle) {
        return result;
    }
    for (int slot = 0; slot < what.slots && waiting < (int) requests.size(); ++slot) {
        if (owner[slot] < 0) {
            owner[slot] = waiting;
            requests[waiting].slot = slot;
            result.push_back({ waiting, slot });
            ++waiting;
        }
    }
    if (!result.empty() && (exclusive() || n_cohorts == 0)) {
        ++n_cohorts;
    }
    return result;
}

std::optional<step> scheduler::next() {
    step s;
    s.cohort = n_cohorts;
    if (!exclusive()) {
        fill_generated(s);
        fill_in_order(s, what.batch - s.n_generated());
        s.ph = s.n_generated() == 0 ? phase::prefill : s.n_prompt() == 0 ? phase::generate : phase::mixed;
    } else if (prompts_left()) {
        s.ph = phase::prefill;
        const int room = room_for_prompts(s);
        switch (what.pol) {
            case policy::barrier_fair:   fill_fair(s, room);     break;
            case policy::barrier_serial: fill_one(s, room);      break;
            case policy::barrier_greedy:
            case policy::mixed:          fill_in_order(s, room); break;
        }
    } else {
        s.ph = phase::generate;
        fill_generated(s);
    }
    if (s.chunks.empty()) {
        return std::nullopt;
    }
    return s;
}

void scheduler::add_prompt(step & s, int request, int n) const {
    const state & r = requests[request];
    s.chunks.push_back({ r.slot, request, r.prompt, n, true, r.prompt + n == what.lengths[request] });
}

void scheduler::fill_in_order(step & s, int room) const {
    for (int request : owner) {
        if (request >= 0 && rest(request) > 0 && room > 0) {
            const int n = std::min(room, rest(request));
            add_prompt(s, request, n);
            room -= n;
        }
    }
}

void scheduler::fill_fair(step & s, int room) const {
    std::vector<int> candidates;
    for (int request : owner) {
        if (request >= 0 && rest(request) > 0) {
            candidates.push_back(request);
        }
    }
    // ascending, with the share computed anew for each: what a short one leaves over goes to the longer ones
    std::stable_sort(candidates.begin(), candidates.end(), [&](int a, int b) { return rest(a) < rest(b); });
    for (size_t i = 0; i < candidates.size() && room > 0; ++i) {
        const int others = (int) (candidates.size() - i);
        const int share  = (room + others - 1) / others;
        const int n      = std::min({ share, rest(candidates[i]), room });
        add_prompt(s, candidates[i], n);
        room -= n;
    }
}

void scheduler::fill_one(step & s, int room) const {
    for (int request : owner) {
        if (request >= 0 && rest(request) > 0) {
            add_prompt(s, request, std::min(room, rest(request)));
            return;
        }
    }
}

void scheduler::fill_generated(step & s) const {
    for (int request : owner) {
        if (request >= 0 && requests[request].generated > requests[request].fed) {
            const state & r = requests[request];
            s.chunks.push_back({ r.slot, request, what.lengths[request] + r.fed, 1, false, false });
        }
    }
}

int scheduler::room_for_prompts(step & s) const {
    if (what.fault == plant::mixed) {
        plant_mixed(s);
    }
    return what.batch - (int) s.chunks.size();
}

void scheduler::plant_mixed(step & s) const {
    for (int request : owner) {
        if (request >= 0 && rest(request) == 0 && what.batch > 1) {
            s.chunks.push_back({ requests[request].slot, request, what.lengths[request], 1, false, false });
            return;
        }
    }
}

void scheduler::decoded(const step & s) {
    for (const chunk & c : s.chunks) {
        (c.prompt ? requests[c.request].prompt : requests[c.request].fed) += c.n;
    }
}

std::vector<sampling> scheduler::to_sample() const {
    std::vector<sampling> result;
    const bool closed = exclusive() && prompts_left();
    bool planted = false;
    for (int slot = 0; slot < what.slots; ++slot) {
        const int request = owner[slot];
        if (request < 0 || rest(request) > 0) {
            continue;
        }
        const state & r = requests[request];
        if (closed && (what.fault != plant::early || planted)) {
            continue;
        }
        if (r.generated == r.fed) {
            result.push_back({ request, slot, r.generated == 0 });
            planted = true;
        }
    }
    return result;
}

bool scheduler::sampled(int request) {
    state & r = requests[request];
    if (++r.generated < what.predict) {
        return false;
    }
    owner[r.slot] = -1;
    return true;
}

} // namespace harness

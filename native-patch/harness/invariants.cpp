#include "invariants.h"

#include <algorithm>

namespace harness {

namespace {

std::string describe(const work & w) {
    return std::to_string(w.prompt) + " prompt tokens, " + std::to_string(w.generated) + " sampled, " + std::to_string(w.fed) +
           " generated tokens decoded";
}

std::string of_request(int request) {
    return "request " + std::to_string(request);
}

} // namespace

violation::violation(const std::string & invariant, const std::string & detail)
    : std::runtime_error("invariant " + invariant + " violated: " + detail), invariant(invariant) {}

bool work::operator==(const work & other) const {
    return prompt == other.prompt && generated == other.generated && fed == other.fed;
}

std::vector<std::string> invariants_of(policy p) {
    std::vector<std::string> names = { "batch-limit", "one-run-per-sequence", "contiguous-positions", "own-prompt-first", "equal-work" };
    if (p != policy::mixed) {
        names.insert(names.end(), { "no-mixed-batch", "no-early-first-token", "closed-cohort" });
    }
    if (p == policy::barrier_serial) {
        names.push_back("one-owner");
    }
    return names;
}

monitor::monitor(const plan & p) : what(p), requests(p.lengths.size()), owner(p.slots, -1) {}

void monitor::on_admit(int request, int slot) {
    if (requests[request].live || requests[request].ended || owner[slot] >= 0) {
        throw violation("contiguous-positions", of_request(request) + " takes slot " + std::to_string(slot) + ", which is not free");
    }
    if (exclusive()) {
        for (size_t i = 0; i < requests.size(); ++i) {
            if (requests[i].live && requests[i].decoded > 0) {
                throw violation("closed-cohort", of_request(request) + " entered while " + of_request((int) i) + " was running");
            }
        }
    }
    requests[request].live = true;
    requests[request].slot = slot;
    owner[slot] = request;
}

void monitor::on_batch(const std::vector<entry> & batch) {
    if (batch.empty() || (int) batch.size() > what.batch) {
        throw violation("batch-limit", std::to_string(batch.size()) + " tokens in a batch of at most " + std::to_string(what.batch));
    }
    std::vector<int>  prompts;
    std::vector<bool> closed(owner.size(), false);
    int n_prompt = 0;
    int n_generated = 0;
    int generating = -1;
    int last = -1;
    for (const entry & e : batch) {
        const int request = e.seq >= 0 && e.seq < (int) owner.size() ? owner[e.seq] : -1;
        if (request < 0) {
            throw violation("contiguous-positions", "a token for sequence " + std::to_string(e.seq) + ", which holds no request");
        }
        if (e.seq != last) {
            if (closed[e.seq]) {
                throw violation("one-run-per-sequence", of_request(request) + " appears twice in one batch");
            }
            if (last >= 0) {
                closed[last] = true;
            }
            last = e.seq;
        }
        account & a = requests[request];
        if (e.pos != a.decoded) {
            throw violation("contiguous-positions", of_request(request) + " continues at position " + std::to_string(e.pos) +
                            ", expected " + std::to_string(a.decoded));
        }
        if (in_prompt(request)) {
            ++n_prompt;
            if (prompts.empty() || prompts.back() != request) {
                prompts.push_back(request);
            }
        } else {
            ++n_generated;
            generating = request;
        }
        ++a.decoded;
    }
    if (exclusive() && n_prompt > 0 && n_generated > 0) {
        throw violation("no-mixed-batch", "a batch holds " + std::to_string(n_prompt) + " prompt tokens and " +
                        std::to_string(n_generated) + " generated ones (" + of_request(generating) + ")");
    }
    check_owner(prompts);
    ++n_batches;
    total.prompt += n_prompt;
    total.fed += n_generated;
}

void monitor::check_owner(const std::vector<int> & prompts) {
    if (what.pol != policy::barrier_serial || prompts.empty()) {
        return;
    }
    if (prompts.size() > 1) {
        throw violation("one-owner", "a batch holds prompt tokens of " + of_request(prompts[0]) + " and " + of_request(prompts[1]));
    }
    if (serial >= 0 && serial != prompts[0] && in_prompt(serial)) {
        throw violation("one-owner", of_request(prompts[0]) + " took over before the prompt of " + of_request(serial) + " was whole");
    }
    serial = prompts[0];
}

void monitor::on_sample(int request) {
    account & a = requests[request];
    if (!a.live || in_prompt(request) || a.decoded != what.lengths[request] + a.generated) {
        throw violation("own-prompt-first", of_request(request) + " was sampled with " + std::to_string(a.decoded) + " tokens decoded of " +
                        std::to_string(what.lengths[request] + a.generated));
    }
    if (exclusive()) {
        for (int other : owner) {
            if (other >= 0 && in_prompt(other)) {
                throw violation("no-early-first-token", of_request(request) + " was sampled while the prompt of " + of_request(other) +
                                " had " + std::to_string(what.lengths[other] - requests[other].decoded) + " tokens to go");
            }
        }
    }
    ++a.generated;
    ++n_samples;
    ++total.generated;
}

void monitor::on_release(int request) {
    account & a = requests[request];
    if (!a.live || a.generated != what.predict) {
        throw violation("equal-work", of_request(request) + " ended after " + std::to_string(a.generated) + " tokens, expected " +
                        std::to_string(what.predict));
    }
    a.live = false;
    a.ended = true;
    owner[a.slot] = -1;
}

void monitor::on_end(const work & expected) const {
    for (size_t i = 0; i < requests.size(); ++i) {
        if (!requests[i].ended) {
            throw violation("equal-work", of_request((int) i) + " never ended");
        }
    }
    if (!(total == expected)) {
        throw violation("equal-work", "did " + describe(total) + "; the plan is " + describe(expected));
    }
}

work simulate(const plan & p) {
    scheduler sched(p);
    monitor   watch(p);
    // a schedule that makes no progress would loop for ever: each batch decodes at least one token
    int64_t left = 1;
    work expected;
    for (int length : p.lengths) {
        expected.prompt += length;
        expected.generated += p.predict;
        expected.fed += p.predict - 1;
    }
    left += expected.prompt + expected.fed;
    while (true) {
        for (const admission & a : sched.admit()) {
            watch.on_admit(a.request, a.slot);
        }
        const auto s = sched.next();
        if (!s) {
            break;
        }
        if (--left < 0) {
            throw violation("equal-work", "the schedule does not end");
        }
        std::vector<entry> batch;
        for (const chunk & c : s->chunks) {
            for (int i = 0; i < c.n; ++i) {
                batch.push_back({ c.slot, c.pos + i });
            }
        }
        watch.on_batch(batch);
        sched.decoded(*s);
        for (const sampling & x : sched.to_sample()) {
            watch.on_sample(x.request);
            if (sched.sampled(x.request)) {
                watch.on_release(x.request);
            }
        }
    }
    watch.on_end(expected);
    return watch.done();
}

work simulate_all(plan p) {
    p.fault = plant::none;
    std::optional<work> first;
    for (policy pol : all_policies()) {
        p.pol = pol;
        const work w = simulate(p);
        if (first && !(*first == w)) {
            throw violation("equal-work", std::string(name(pol)) + ": " + describe(w) + "; " + name(policy::mixed) + ": " + describe(*first));
        }
        first = w;
    }
    return *first;
}

} // namespace harness

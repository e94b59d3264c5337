#include "drive.h"

#include <algorithm>

namespace harness {

namespace {

class driver {
  public:
    driver(const flags & f, engine & eng, run_record & out) : f(f), eng(eng), out(out), sched(f.what), watch(f.what) {
        out.requests.assign(f.what.lengths.size(), {});
    }

    void run() {
        const work expected = simulate_all(f.what);
        t_begin = eng.now_us();
        while (one_batch()) {
        }
        out.t_end_us = now();
        watch.on_end(expected);
        out.complete = true;
    }

  private:
    const flags & f;
    engine &      eng;
    run_record &  out;
    scheduler     sched;
    monitor       watch;
    int64_t       t_begin = 0;

    int64_t now() { return eng.now_us() - t_begin; }

    void event(const char * what, int request, int slot) { out.events.push_back({ now(), what, request, slot, sched.cohort() }); }

    int token_at(int request, int index) {
        const std::vector<int> & tokens = out.requests[request].tokens;
        // only a planted fault asks for a token that was not sampled
        return index < (int) tokens.size() ? tokens[index] : eng.sample_retained(request).id;
    }

    bool one_batch() {
        admit();
        const auto s = sched.next();
        if (!s) {
            return false;
        }
        eng.build(*s, [this](int request, int index) { return token_at(request, index); });
        watch.on_batch(eng.contents());
        batch_record b;
        b.what = *s;
        const int64_t cpu_begin = eng.cpu_us();
        b.t_start_us = now();
        eng.decode();
        b.t_end_us = now();
        b.cpu_us = eng.cpu_us() - cpu_begin;
        out.batches.push_back(b);
        out.done = watch.done();
        retain(b);
        sched.decoded(*s);
        sample(*s);
        out.done = watch.done();
        out.samples = watch.samples();
        return true;
    }

    void admit() {
        for (const admission & a : sched.admit()) {
            watch.on_admit(a.request, a.slot);
            request_record & r = out.requests[a.request];
            r.slot = a.slot;
            r.cohort = sched.cohort();
            r.t_admit_us = now();
            event("admit", a.request, a.slot);
        }
    }

    void retain(const batch_record & b) {
        int end = 0;
        for (const chunk & c : b.what.chunks) {
            end += c.n;
            if (c.ends_prompt) {
                eng.retain(c.request, end - 1);
                out.requests[c.request].t_prompt_done_us = b.t_end_us;
                out.events.push_back({ b.t_end_us, "ready", c.request, c.slot, b.what.cohort });
            }
        }
    }

    static int row_of(const step & s, int request) {
        int end = 0;
        for (const chunk & c : s.chunks) {
            end += c.n;
            if (c.request == request) {
                return end - 1;
            }
        }
        throw violation("own-prompt-first", "request " + std::to_string(request) + " is sampled from a batch it has no token in");
    }

    void sample(const step & s) {
        std::vector<int>     ended;
        std::vector<opening> opened;
        for (const sampling & x : sched.to_sample()) {
            watch.on_sample(x.request);
            request_record & r = out.requests[x.request];
            if (x.first && opened.empty() && f.what.pol != policy::mixed) {
                event("open", -1, -1);
            }
            const sampled_token t = x.first ? eng.sample_retained(x.request) : eng.sample_row(row_of(s, x.request));
            r.tokens.push_back(t.id);
            r.smallest_gap = r.smallest_gap < 0 ? t.gap : std::min(r.smallest_gap, t.gap);
            if (x.first) {
                r.first_row_hash = t.hash;
                r.t_first_token_us = now();
                event("first_token", x.request, x.slot);
                eng.drop_retained(x.request);
                opened.push_back({ x.request, x.slot, f.what.lengths[x.request], t.id });
            }
            if (sched.sampled(x.request)) {
                ended.push_back(x.request);
            }
        }
        draft(opened);
        for (const int request : ended) {
            release(request);
        }
    }

    void draft(const std::vector<opening> & opened) {
        if (!f.mtp || opened.empty()) {
            return;
        }
        const int64_t begin = now();
        const auto drafts = eng.draft(opened);
        for (size_t i = 0; i < opened.size() && i < drafts.size(); ++i) {
            out.requests[opened[i].request].drafted = drafts[i];
        }
        out.draft_us += now() - begin;
    }

    void release(int request) {
        request_record & r = out.requests[request];
        watch.on_release(request);
        eng.release(r.slot);
        r.t_end_us = now();
        event("release", request, r.slot);
    }
};

} // namespace

void drive(const flags & f, engine & eng, run_record & out) {
    driver(f, eng, out).run();
}

} // namespace harness

// Exhaustive exploration of the phase machine in small scopes.
//
// A small model of the server (slots, deferred tasks, prompt chunks, generated tokens, parents with children, errors, cancels,
// a clock of ticks) drives the real machine through every interleaving of arrive, step, finish, cancel, error, no room and tick.
// What is right is decided by the model's own books, never by the machine's: which prompts are unfinished, who waits for whom.
//
//   never mixed   no step may hold prompt and generated tokens
//   never early   nobody generates while a prompt that was processed in the same phase is unfinished
//   never late in whoever arrives after a companion's prompt ended is not let into that phase; under `drain` he processes nothing
//                 before everybody who ran when he came has left, under `yield` not before the quantum
//   always live   if a slot is busy, something can run or a wake-up time is set; and from every state everything ends
//   no leak       at the end every slot is NONE and the engine IDLE
//   exact mirror  the transitions alone rebuild every member state, the seal and the engine's phase
//
// The machine's private state is read for one purpose: two states are merged only if they agree in all that decides the future.
//
// Build with -DPHASE_MUTATION=1..3 to plant a fault between model and machine; the exploration must then fail.
// Usage: explore_phase_machine [name of a scope]

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#define private public
#include "phase-machine.h"
#undef private

#ifndef PHASE_MUTATION
#define PHASE_MUTATION 0
#endif

using namespace phase;

namespace {

// --- the subject: the machine, with an optional planted fault

struct subject {
    machine m;

    bool can_prefill(int slot) const {
        if (PHASE_MUTATION == 3 && m.state(slot) == member::queued && m.state() == engine::prefill) {
            return true; // lets latecomers into a sealed cohort
        }
        return m.can_prefill(slot);
    }

    bool can_generate(int slot) const {
        if (PHASE_MUTATION == 1 && m.state(slot) == member::ready) {
            return true; // a finished member does not wait
        }
        return m.can_generate(slot);
    }

    void on_release(int slot, int64_t n_generated, int64_t now) {
        if (PHASE_MUTATION == 2 && m.state(slot) == member::prefill && m.sealed()) {
            return; // forgets a member that leaves while the others wait for it
        }
        m.on_release(slot, n_generated, now);
    }
};

// --- scopes

struct request {
    task_kind kind     = task_kind::sampling;
    int       chunks   = 1; // prompt, in units of one decode
    int       gens     = 1; // answer, in tokens; the first one comes with the opening
    int       children = 0; // they wait for the parent's prompt
    int       gather   = 0; // admit window in ticks
};

struct scope {
    const char *         name;
    policy               pol;
    int                  n_slots;
    int                  quantum; // ticks
    bool                 faults;  // errors and no-room answers, besides cancels
    int                  pool;    // chunks and tokens that fit, 0: no limit
    std::vector<request> requests;
};

constexpr int64_t TICK = 10; // microseconds; not 1, so that nothing depends on the unit

enum class life : uint8_t { ahead, deferred, running, gone };

struct task {
    int  req    = -1; // index into scope::requests
    int  parent = -1; // index of the parent's task
    life where  = life::ahead;
    int  slot   = -1;
    int  chunks = 0;
    int  gens   = 0;
    int  made   = 0;          // tokens generated
    bool done_prompt = false;
    bool waits_parent = false;
    bool stepped = false;     // took part in a step since the last opening
    bool in_phase = false;    // its prompt is or was part of the present prefill phase
    int  quota = 0;           // remaining no-room answers
    int64_t t_arrive = 0;
    uint64_t barred = 0;      // the cohort it may not enter any more, +1
    uint32_t ahead_of_me = 0; // tasks that ran when it came (bit set)
};

struct mirror {
    std::vector<member> slots;
    bool   sealed = false;
    engine eng    = engine::idle;
};

struct world {
    subject           s;
    std::vector<task> tasks;
    std::vector<int>  deferred;
    mirror            seen;
    int64_t           now     = 0;
    int64_t           t_open  = 0;
    uint64_t          phase   = 0; // the cohort that the books' `in_phase` speaks of
    bool              overdue = false; // somebody had waited for the quantum when it began
    int               next    = 0; // next request to arrive
};

struct violation {
    std::string what;
};

struct explorer {
    const scope & sc;
    std::unordered_set<std::string> visited;
    std::vector<std::string> path;
    std::vector<transition> scratch;
    size_t n_steps = 0;
    size_t n_ends  = 0;

    int64_t horizon = 0; // ticks beyond which age makes no difference

    explicit explorer(const scope & s) : sc(s) {
        horizon = sc.pol == policy::yield ? sc.quantum + 1 : 0;
        for (const auto & r : sc.requests) {
            horizon = std::max<int64_t>(horizon, r.gather > 0 ? r.gather + 1 : 0);
        }
    }

    [[noreturn]] static void fail(const std::string & what) { throw violation{ what }; }

    static void require(bool ok, const char * what) {
        if (!ok) {
            fail(what);
        }
    }

    // calls the machine and follows its transitions; the ring lives outside the copied states
    template <typename F> void call(world & w, F && f) {
        w.s.m.ring.swap(scratch);
        w.s.m.last_seq = 0;
        f();
        const transitions tr = w.s.m.since(0);
        w.s.m.ring.swap(scratch);
        require(tr.lost == 0, "lost transitions");
        for (const auto & t : tr.events) {
            follow(w.seen, t);
            if (t.event == event_kind::open) {
                w.t_open = w.now;
                for (auto & each : w.tasks) {
                    each.stepped = false;
                }
            }
        }
        if (sc.pol == policy::mixed) { // the phase only describes what runs
            auto any = [&](member m) { return std::count(w.seen.slots.begin(), w.seen.slots.end(), m) > 0; };
            w.seen.eng = any(member::prefill) ? engine::prefill : any(member::generate) ? engine::generate : engine::idle;
        }
        compare(w);
    }

    static void follow(mirror & v, const transition & t) {
        switch (t.event) {
            case event_kind::admit:
                v.slots[t.slot] = t.cohort == 0 ? member::queued : member::prefill;
                if (t.cohort != 0 && v.eng != engine::prefill) {
                    v.eng    = engine::prefill;
                    v.sealed = false;
                }
                break;
            case event_kind::seal:  v.sealed = true; break;
            case event_kind::ready: v.slots[t.slot] = member::ready; break;
            case event_kind::open:
                if (t.slot >= 0) { // `mixed`: this slot alone
                    v.slots[t.slot] = member::generate;
                    break;
                }
                v.eng    = engine::generate;
                v.sealed = false;
                for (auto & m : v.slots) {
                    m = m == member::ready ? member::generate : m;
                }
                break;
            case event_kind::pause:   v.slots[t.slot] = member::paused; break;
            case event_kind::resume:  v.slots[t.slot] = member::generate; break;
            case event_kind::release: v.slots[t.slot] = member::none; break;
            case event_kind::idle:    v.eng = engine::idle; v.sealed = false; break;
        }
    }

    static void compare(const world & w) {
        const auto & m = w.s.m;
        for (size_t i = 0; i < m.n_slots(); i++) {
            const bool mutated = PHASE_MUTATION != 0;
            require(mutated || w.seen.slots[i] == m.state((int) i), "the transitions do not rebuild a member's state");
        }
        require(w.seen.eng == m.state(), "the transitions do not rebuild the engine's phase");
        require(w.seen.sealed == m.sealed(), "the transitions do not rebuild the seal");
    }

    // --- the model of the server

    world begin() {
        world w;
        config cfg;
        cfg.pol         = sc.pol;
        cfg.yield_us    = sc.quantum * TICK;
        cfg.pool_tokens = sc.pool;
        w.now = 1000;
        w.s.m.configure(cfg, sc.n_slots, w.now);
        w.seen.slots.assign(sc.n_slots, member::none);
        for (size_t r = 0; r < sc.requests.size(); r++) {
            const int parent = (int) w.tasks.size();
            for (int c = 0; c <= sc.requests[r].children; c++) {
                task t;
                t.req    = (int) r;
                t.parent = c > 0 ? parent : -1;
                t.chunks = sc.requests[r].chunks;
                t.gens   = sc.requests[r].gens;
                t.quota  = 1;
                w.tasks.push_back(t);
            }
        }
        return w;
    }

    std::vector<int> family(const world & w, int req) const {
        std::vector<int> res;
        for (size_t i = 0; i < w.tasks.size(); i++) {
            if (w.tasks[i].req == req) {
                res.push_back((int) i);
            }
        }
        return res;
    }

    static std::vector<int> running(const world & w) {
        std::vector<int> res;
        for (size_t i = 0; i < w.tasks.size(); i++) {
            if (w.tasks[i].where == life::running) {
                res.push_back((int) i);
            }
        }
        return res;
    }

    std::vector<int> free_slots(const world & w) const {
        std::vector<int> res;
        for (int s = 0; s < sc.n_slots; s++) {
            const auto r = running(w);
            if (std::none_of(r.begin(), r.end(), [&](int t) { return w.tasks[t].slot == s; })) {
                res.push_back(s);
            }
        }
        return res;
    }

    // the prompt of a sampling companion of the present phase is whole: the door is shut
    bool door_shut(const world & w) const {
        for (size_t i = 0; i < w.tasks.size(); i++) {
            if (w.tasks[i].in_phase && w.tasks[i].done_prompt && rq_of(w, (int) i).kind == task_kind::sampling) {
                return true;
            }
        }
        return false;
    }

    bool launch(world & w, int req) {
        const auto ids  = family(w, req);
        const auto free = free_slots(w);
        if (free.size() < ids.size()) {
            return false;
        }
        const request & rq = sc.requests[req];
        uint32_t running_now = 0;
        for (const int t : running(w)) {
            running_now |= w.tasks[t].done_prompt && rq_of(w, t).kind == task_kind::sampling ? 1u << t : 0u;
        }
        const bool shut = sc.pol != policy::mixed && door_shut(w);
        std::vector<admission> group;
        for (size_t i = 0; i < ids.size(); i++) {
            task & t = w.tasks[ids[i]];
            t.where        = life::running;
            t.slot         = free[i];
            t.t_arrive     = w.now;
            t.waits_parent = t.parent >= 0;
            t.ahead_of_me  = running_now;
            t.barred       = shut ? w.s.m.cohort() + 1 : 0;
            admission a;
            a.slot      = t.slot;
            a.kind      = rq.kind;
            a.n_prompt  = rq.chunks;
            a.n_final   = rq.chunks + rq.gens;
            a.gather_us = rq.gather * TICK;
            group.push_back(a);
        }
        call(w, [&] { w.s.m.on_admit(group, w.now); });
        return true;
    }

    const request & rq_of(const world & w, int t) const { return sc.requests[w.tasks[t].req]; }

    void arrive(world & w) {
        const int req = w.next++;
        if (!w.deferred.empty() || !launch(w, req)) {
            w.deferred.push_back(req);
            for (const int t : family(w, req)) {
                w.tasks[t].where = life::deferred;
            }
        }
    }

    void release(world & w, int id) {
        task & t = w.tasks[id];
        const int slot = t.slot;
        t.where = life::gone;
        t.slot  = -1;
        // an orphan owns a full copy of the prompt and processes it itself
        for (auto & child : w.tasks) {
            if (child.parent == id && child.where == life::running && child.waits_parent) {
                child.waits_parent = false;
            }
        }
        call(w, [&] { w.s.on_release(slot, t.made, w.now); });
        while (!w.deferred.empty() && launch(w, w.deferred.front())) {
            w.deferred.erase(w.deferred.begin());
        }
    }

    bool works_prompt(const world & w, int id) const {
        const task & t = w.tasks[id];
        return t.where == life::running && !t.done_prompt && !t.waits_parent && w.s.can_prefill(t.slot);
    }

    bool works_answer(const world & w, int id) const {
        const task & t = w.tasks[id];
        return t.where == life::running && t.done_prompt && w.s.can_generate(t.slot);
    }

    // --- what must hold whenever the server is about to build a batch

    void judge(const world & w) const {
        require(w.s.m.check() == nullptr, w.s.m.check() ? w.s.m.check() : "");
        if (sc.pol == policy::mixed) {
            return;
        }
        bool prompts = false;
        bool answers = false;
        for (const int id : running(w)) {
            prompts |= works_prompt(w, id);
            answers |= works_answer(w, id);
        }
        require(!(prompts && answers), "mixed: a prompt and an answer may run in one step");

        for (const int id : running(w)) {
            const task & t = w.tasks[id];
            if (works_answer(w, id)) {
                for (const int other : running(w)) {
                    require(!w.tasks[other].in_phase || w.tasks[other].done_prompt || rq_of(w, other).kind != task_kind::sampling,
                            "early: an answer may start before a companion's prompt ended");
                }
            }
            if (works_prompt(w, id)) {
                require(t.barred == 0 || t.barred != w.s.m.cohort() + 1, "late: let into a phase whose door was shut");
                judge_latecomer(w, t);
            }
        }
        judge_yield(w);
        judge_liveness(w);
    }

    void judge_latecomer(const world & w, const task & t) const {
        bool blocked = false;
        for (size_t other = 0; other < w.tasks.size(); other++) {
            blocked |= (t.ahead_of_me >> other & 1u) != 0 && w.tasks[other].where == life::running;
        }
        if (!blocked) {
            return;
        }
        require(sc.pol == policy::yield, "drain: a prompt runs before the cohort that it found has left");
        require(w.overdue, "yield: running answers are paused before anybody waited for the quantum");
    }

    // with room for all, nobody queues beyond the quantum once every running answer made a step
    void judge_yield(const world & w) const {
        if (sc.pol != policy::yield || sc.pool > 0 || w.s.m.state() != engine::generate) {
            return;
        }
        bool all_stepped = true;
        bool overdue     = false;
        // one for whom there was no room waits for the drain, and nobody overtakes it
        bool held_up     = false;
        for (const int id : running(w)) {
            const task & t = w.tasks[id];
            if (works_answer(w, id)) {
                all_stepped &= t.stepped;
            } else if (!t.done_prompt) {
                held_up |= t.quota == 0;
                overdue |= w.now - std::max(t.t_arrive, w.t_open) >= sc.quantum * TICK;
            }
        }
        require(!all_stepped || !overdue || held_up, "yield: a queued prompt is kept beyond its quantum");
    }

    void judge_liveness(const world & w) const {
        const auto busy = running(w);
        if (busy.empty()) {
            return;
        }
        const bool works = std::any_of(busy.begin(), busy.end(), [&](int id) { return works_prompt(w, id) || works_answer(w, id); });
        const auto wake = w.s.m.wake_at();
        if (!works) {
            require(wake.has_value(), "dead: slots are busy, nothing can run and nobody will wake up");
            require(*wake > w.now, "dead: the wake-up time has passed");
            require(*wake - w.now <= 3 * TICK, "dead: the wake-up time is out of reach");
            require(!free_slots(w).empty(), "the admit window is held open with no slot free");
        }
    }

    // --- one step of the server

    struct plan {
        std::vector<int> prompts;
        std::vector<int> answers;
        int  bad     = -1;    // the task whose part fails
        bool no_room = false; // it finds no room, otherwise an error
    };

    // everything up to the point at which the batch is built
    void begin_step(world & w) {
        call(w, [&] { w.s.m.advance(w.now); });
        settle_books(w);
        judge(w);
        for (const auto & o : w.s.m.take_opened()) {
            for (const int id : running(w)) {
                task & t = w.tasks[id];
                if (t.slot != o.slot) {
                    continue;
                }
                require(t.done_prompt, "opened without a prompt");
                require(o.resumed == (t.made > 0), "first token or resumption confused");
                if (!o.resumed) {
                    token(w, id); // from the retained row
                }
                break;
            }
        }
    }

    void settle_books(world & w) {
        if (w.s.m.state() != engine::prefill || w.s.m.cohort() != w.phase) {
            for (auto & t : w.tasks) {
                t.in_phase = false;
            }
            w.phase   = w.s.m.cohort();
            w.overdue = false;
            for (const int id : running(w)) {
                w.overdue |= works_prompt(w, id) && w.now - std::max(w.tasks[id].t_arrive, w.t_open) >= sc.quantum * TICK;
            }
        }
        for (const int id : running(w)) {
            w.tasks[id].in_phase |= works_prompt(w, id) && sc.pol != policy::mixed;
        }
    }

    void token(world & w, int id) {
        task & t = w.tasks[id];
        t.made++;
        if (t.made >= t.gens) {
            release(w, id);
        }
    }

    void finish_step(world & w, const plan & p) {
        for (const int id : p.prompts) {
            task & t = w.tasks[id];
            if (t.where != life::running) {
                continue;
            }
            if (id == p.bad) {
                if (p.no_room) {
                    t.chunks   = rq_of(w, id).chunks;
                    t.quota    = 0;
                    t.in_phase = false;
                    call(w, [&] { w.s.m.on_no_room(t.slot, w.now); });
                } else {
                    release(w, id);
                }
                continue;
            }
            if (--t.chunks == 0) {
                prompt_done(w, id);
            }
        }
        for (const int id : p.answers) {
            task & t = w.tasks[id];
            if (t.where != life::running) {
                continue;
            }
            if (id == p.bad) {
                release(w, id);
                continue;
            }
            t.stepped = true;
            call(w, [&] { w.s.m.on_generate_step(t.slot, rq_of(w, id).chunks + t.made, t.made); });
            token(w, id);
        }
        call(w, [&] { w.s.m.settle(w.now); });
        settle_end(w);
    }

    void settle_end(world & w) const {
        if (running(w).empty()) {
            require(w.s.m.state() == engine::idle, "an empty engine is not idle at the end of a step");
        }
    }

    void prompt_done(world & w, int id) {
        task & t = w.tasks[id];
        t.done_prompt = true;
        call(w, [&] { w.s.m.on_prompt_done(t.slot, w.now); });
        if (rq_of(w, id).kind == task_kind::prefill_only) {
            release(w, id);
            return;
        }
        for (size_t c = 0; c < w.tasks.size(); c++) {
            task & child = w.tasks[c];
            if (child.parent == id && child.where == life::running && child.waits_parent) {
                child.waits_parent = false;
                child.chunks       = 0;
                child.in_phase     = t.in_phase;
                prompt_done(w, (int) c);
            }
        }
        if (sc.pol == policy::mixed) {
            token(w, id);
        }
    }

    // all the ways in which the batch can be composed and end
    std::vector<plan> plans(const world & w) const {
        std::vector<int> prompts;
        std::vector<int> answers;
        for (const int id : running(w)) {
            if (works_prompt(w, id)) { prompts.push_back(id); }
            if (works_answer(w, id)) { answers.push_back(id); }
        }
        std::vector<plan> res;
        auto add = [&](const std::vector<int> & ps, const std::vector<int> & as) {
            plan base;
            base.prompts = ps;
            base.answers = as;
            res.push_back(base);
            if (!sc.faults) {
                return;
            }
            const bool others = w.s.m.count(member::ready) + w.s.m.count(member::paused) > 0;
            for (const int id : ps) {
                plan q = base;
                q.bad  = id;
                res.push_back(q);
                if (sc.pol == policy::yield && others && w.tasks[id].quota > 0 && w.tasks[id].parent < 0 && rq_of(w, id).children == 0) {
                    q.no_room = true;
                    res.push_back(q);
                }
            }
            for (const int id : as) {
                plan q = base;
                q.bad  = id;
                res.push_back(q);
            }
        };
        add(prompts, answers);
        // shares and incompatible groups: only one of several takes part
        if (prompts.size() + answers.size() > 1) {
            for (const int id : prompts) { add({ id }, {}); }
            for (const int id : answers) { add({}, { id }); }
        }
        return res;
    }

    // --- search

    // Everything that decides the future. A field that is added to the machine breaks the bindings below: think about it here.
    std::string key(const world & w) const {
        std::string k;
        auto put = [&k](int64_t v) { k.append(reinterpret_cast<const char *>(&v), 2); };
        auto age = [&](int64_t t) { return std::min<int64_t>((w.now - t) / TICK, horizon); };
        const auto & [cfg, slots, eng, is_sealed, has_blocked, cohort_id, n_only, n_groups, t_engine, done, ring, last_seq] = w.s.m;
        (void) cfg; (void) n_groups; (void) done; (void) ring; (void) last_seq;
        put((int) eng); put(is_sealed); put(has_blocked); put((int64_t) n_only); put(age(t_engine));
        for (const auto & s : slots) {
            const auto & [state, kind, cohort, group, t_admit, t_state, gather_us, n_prompt, n_shared, n_final, n_held, n_generated,
                          queue_us, wait_us, paused_us, has_stepped, no_yield, is_opened, is_resumed, waited_us, tag] = s;
            (void) t_state; (void) n_generated; (void) queue_us; (void) wait_us; (void) paused_us; (void) waited_us; (void) tag;
            int64_t rank = 0;
            for (const auto & o : slots) {
                rank += state != member::none && o.state != member::none && o.group < group ? 1 : 0;
            }
            put((int) state); put((int) kind); put(cohort == 0 ? -1 : (int64_t) (cohort_id - cohort)); put(rank);
            put(state == member::none ? 0 : age(t_admit)); put(gather_us); put(n_prompt); put(n_shared); put(n_final); put(n_held);
            put(has_stepped); put(no_yield); put(is_opened); put(is_resumed);
        }
        put(age(w.t_open)); put(w.next); put(w.overdue); put((int64_t) (cohort_id - w.phase));
        for (const auto & t : w.tasks) {
            put((int) t.where); put(t.slot); put(t.chunks); put(t.made); put(t.done_prompt); put(t.waits_parent); put(t.stepped);
            put(t.in_phase); put(t.quota); put(t.where == life::running ? age(t.t_arrive) : 0);
            put(t.barred == 0 ? -1 : t.barred == cohort_id + 1 ? 1 : 0); put(t.where == life::running ? t.ahead_of_me : 0);
        }
        for (const int d : w.deferred) { put(d); }
        return k;
    }

    static bool finished(const world & w, size_t n_requests) {
        return w.next == (int) n_requests && std::all_of(w.tasks.begin(), w.tasks.end(), [](const task & t) { return t.where == life::gone; });
    }

    // without further arrivals or faults everything ends, in bounded time
    void run_down(world w) {
        for (int i = 0; i < 200; i++) {
            if (running(w).empty()) {
                call(w, [&] { w.s.m.advance(w.now); });
                settle_end(w);
                require(w.deferred.empty(), "leak: a task is deferred although every slot is free");
                for (int s = 0; s < sc.n_slots; s++) {
                    require(w.s.m.state(s) == member::none, "leak: a slot without a task has a member state");
                }
                return;
            }
            begin_step(w);
            finish_step(w, plans(w).front());
            w.now += TICK;
        }
        fail("dead: tasks do not end");
    }

    template <typename F> void branch(const world & w, const std::string & name, F && f) {
        world v = w;
        path.push_back(name);
        f(v);
        visit(v);
        path.pop_back();
    }

    void visit(const world & w) {
        if (!visited.insert(key(w)).second) {
            return;
        }
        run_down(w);
        if (finished(w, sc.requests.size())) {
            n_ends++;
            return;
        }
        if (w.next < (int) sc.requests.size()) {
            branch(w, "arrive " + std::to_string(w.next), [&](world & v) { arrive(v); });
        }
        for (size_t i = 0; i < w.tasks.size(); i++) {
            if (w.tasks[i].where == life::running) {
                branch(w, "cancel " + std::to_string(i), [&](world & v) { release(v, (int) i); });
            }
        }
        for (size_t d = 0; d < w.deferred.size(); d++) {
            branch(w, "cancel deferred " + std::to_string(w.deferred[d]), [&](world & v) {
                for (const int t : family(v, v.deferred[d])) {
                    v.tasks[t].where = life::gone;
                }
                v.deferred.erase(v.deferred.begin() + d);
            });
        }
        if (horizon > 0) {
            branch(w, "tick", [&](world & v) { v.now += TICK; });
        }
        world at_batch = w;
        path.push_back("step");
        begin_step(at_batch);
        path.pop_back();
        const auto all = plans(at_batch);
        for (size_t p = 0; p < all.size(); p++) {
            n_steps++;
            branch(at_batch, describe(all[p]), [&](world & v) { finish_step(v, all[p]); });
        }
    }

    static std::string describe(const plan & p) {
        std::string s = "step";
        for (const int id : p.prompts) { s += " prompt " + std::to_string(id); }
        for (const int id : p.answers) { s += " answer " + std::to_string(id); }
        if (p.bad >= 0) {
            s += (p.no_room ? " no room for " : " error of ") + std::to_string(p.bad);
        }
        return s;
    }

    bool explore() {
        try {
            visit(begin());
        } catch (const violation & v) {
            std::printf("FAILED %s: %s\n", sc.name, v.what.c_str());
            for (const auto & p : path) {
                std::printf("    %s\n", p.c_str());
            }
            return false;
        }
        std::printf("ok %s: %zu states, %zu steps, %zu ends\n", sc.name, visited.size(), n_steps, n_ends);
        return true;
    }
};

request chat(int chunks, int gens, int gather = 0) {
    request r;
    r.chunks = chunks;
    r.gens   = gens;
    r.gather = gather;
    return r;
}

request embed(int chunks) {
    request r;
    r.kind   = task_kind::prefill_only;
    r.chunks = chunks;
    return r;
}

request family(int chunks, int gens, int children) {
    request r  = chat(chunks, gens);
    r.children = children;
    return r;
}

std::vector<scope> scopes() {
    return {
        //  name               policy          slots quantum faults pool  requests
        { "drain-unequal",      policy::drain, 3, 0, true,  0, { chat(1, 2), chat(2, 1), chat(2, 2), chat(1, 1) } },
        { "drain-four-slots",   policy::drain, 4, 0, false, 0, { chat(1, 1), chat(2, 2), chat(1, 2), chat(2, 1), chat(1, 1) } },
        { "drain-six",          policy::drain, 2, 0, false, 0, { chat(2, 2), chat(1, 1), chat(1, 2), chat(2, 1), chat(1, 1), chat(1, 2) } },
        { "drain-window",       policy::drain, 3, 0, false, 0, { chat(1, 2, 2), chat(1, 1, 1), chat(2, 1, 0), chat(1, 1, 2) } },
        { "drain-embeddings",   policy::drain, 3, 0, true,  0, { embed(1), chat(2, 2), embed(2), chat(1, 1), embed(1) } },
        { "drain-families",     policy::drain, 4, 0, true,  0, { family(2, 1, 1), chat(1, 2), family(1, 2, 1) } },
        { "drain-pool",         policy::drain, 3, 0, true,  6, { chat(2, 2), chat(3, 1), chat(1, 2), chat(2, 1) } },
        { "yield-unequal",      policy::yield, 3, 2, true,  0, { chat(1, 3), chat(2, 2), chat(1, 1) } },
        { "yield-four-slots",   policy::yield, 4, 1, false, 0, { chat(1, 3), chat(1, 2), chat(2, 1), chat(1, 1) } },
        { "yield-six",          policy::yield, 2, 1, false, 0, { chat(1, 2), chat(1, 1), chat(1, 2), chat(1, 1), chat(1, 1), chat(1, 1) } },
        { "yield-window",       policy::yield, 3, 1, false, 0, { chat(1, 3, 1), chat(1, 1, 2), chat(1, 2, 0) } },
        { "yield-embeddings",   policy::yield, 3, 1, true,  0, { chat(1, 3), embed(1), chat(1, 1), embed(2) } },
        { "yield-families",     policy::yield, 4, 1, true,  0, { chat(1, 3), family(1, 2, 1), chat(1, 1) } },
        { "yield-pool",         policy::yield, 3, 1, true,  7, { chat(1, 3), chat(2, 2), chat(3, 1) } },
        { "yield-pool-queue",   policy::yield, 3, 1, false, 6, { chat(1, 2), chat(2, 2), chat(2, 1), chat(1, 1) } },
        { "mixed",              policy::mixed, 3, 0, true,  0, { chat(1, 2), chat(2, 1), embed(1), family(1, 1, 1) } },
    };
}

} // namespace

int main(int argc, char ** argv) {
    bool ok    = true;
    bool found = false;
    for (const auto & sc : scopes()) {
        if (argc > 1 && std::strcmp(argv[1], sc.name) != 0) {
            continue;
        }
        found = true;
        ok &= explorer(sc).explore();
        std::fflush(stdout);
    }
    if (!found) {
        std::printf("no scope of that name\n");
        return 2;
    }
    return ok ? 0 : 1;
}

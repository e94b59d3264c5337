// llama-phase-harness: scheduling policies on libllama, without a server. See usage().

#include "drive.h"
#include "dry-engine.h"

#ifndef HARNESS_WITHOUT_ENGINE
#include "llama-engine.h"
#endif

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <sys/resource.h>
#ifdef __linux__
#include <sys/prctl.h>
#include <unistd.h>
#endif

using namespace harness;

namespace {

enum exit_status { done = 0, went_wrong = 1, bad_flags = 2, violated = 3, no_memory = 4 };

std::unique_ptr<engine> make_engine(const flags & f) {
    if (f.dry_run) {
        return std::make_unique<dry_engine>();
    }
#ifdef HARNESS_WITHOUT_ENGINE
    throw engine_error("model", "engine", "this program was built without one; it knows --dry-run only");
#else
    return make_llama_engine(f);
#endif
}

void limit_memory(int mib) {
    if (mib == 0) {
        return;
    }
    struct rlimit limit;
    limit.rlim_cur = limit.rlim_max = (rlim_t) mib * 1024 * 1024;
    if (setrlimit(RLIMIT_AS, &limit) != 0) {
        throw flag_error(std::string("--memory-limit-mib: ") + strerror(errno));
    }
}

// A runner names itself in the environment: a run must not outlive it, not even when it is killed.
void end_with_runner() {
#ifdef __linux__
    const char * runner = getenv("LLAMA_PHASE_HARNESS_RUNNER");
    if (runner != nullptr) {
        prctl(PR_SET_PDEATHSIG, SIGKILL);
        if (getppid() != (pid_t) atol(runner)) {
            _exit(went_wrong);
        }
    }
#endif
}

int status_of(const failure & f) {
    return f.kind == "invariant" ? violated : f.kind == "memory" ? no_memory : went_wrong;
}

void summarize(const flags & f, const run_record & run) {
    uint64_t hash = hash_tokens({});
    for (const request_record & r : run.requests) {
        hash = hash_tokens(r.tokens, hash);
    }
    printf("%s: %zu batches, %lld prompt tokens, %lld sampled, makespan %lld %s, hash %s\n", name(f.what.pol), run.batches.size(),
           (long long) run.done.prompt, (long long) run.done.generated, (long long) run.t_end_us, f.dry_run ? "tokens" : "us",
           hex(hash).c_str());
}

int run(const flags & f) {
    run_record                  record;
    std::optional<engine_facts> facts;
    std::optional<failure>      failed;
    try {
        const auto eng = make_engine(f);
        facts = eng->facts();
        drive(f, *eng, record);
    } catch (const violation & e) {
        failed = failure{ "invariant", e.invariant, e.what() };
    } catch (const engine_error & e) {
        failed = failure{ e.kind, e.stage, e.what() };
    } catch (const std::bad_alloc &) {
        failed = failure{ "memory", "host", "memory ran out" };
    } catch (const std::exception & e) {
        failed = failure{ "decode", "run", e.what() };
    }
    if (!f.json.empty()) {
        write_atomically(f.json, report(f, facts, record, failed));
    }
    if (failed) {
        fprintf(stderr, "error: %s\n", failed->message.c_str());
        return status_of(*failed);
    }
    summarize(f, record);
    return done;
}

} // namespace

int main(int argc, char ** argv) {
    try {
        const flags f = parse_flags({ argv + 1, argv + argc });
        if (f.help) {
            fputs(usage(), stdout);
            return done;
        }
        end_with_runner();
        limit_memory(f.memory_mib);
        return run(f);
    } catch (const flag_error & e) {
        fprintf(stderr, "error: %s\n", e.what());
        return bad_flags;
    } catch (const std::exception & e) {
        fprintf(stderr, "error: %s\n", e.what());
        return went_wrong;
    }
}

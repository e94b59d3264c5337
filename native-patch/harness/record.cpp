#include "record.h"

#include "json-writer.h"

#include <algorithm>
#include <cerrno>
#include <cinttypes>
#include <cstdio>
#include <cstring>
#include <sys/resource.h>
#include <unistd.h>

namespace harness {

namespace {

int64_t peak_rss_bytes() {
    struct rusage usage;
    return getrusage(RUSAGE_SELF, &usage) == 0 ? (int64_t) usage.ru_maxrss * 1024 : 0;
}

void write_config(json_writer & out, const flags & f) {
    out.key("config").open_object();
    out.field("model", f.model).field("policy", name(f.what.pol)).field("lengths", f.what.lengths);
    out.field("predict", f.what.predict).field("slots", f.what.slots).field("batch", f.what.batch).field("ubatch", f.ubatch);
    out.field("cache", name(f.cache)).field("flash_attn", name(f.flash)).field("kv_unified", f.kv_unified);
    out.field("threads", f.threads).field("gpu_layers", f.gpu_layers).key("tensor_split").open_array();
    for (const float part : f.tensor_split) {
        out.value((double) part);
    }
    out.close_array();
    out.field("ctx", f.context()).field("seed", f.seed).field("mtp", f.mtp).field("mtp_draft", f.mtp ? f.mtp_draft : 0);
    out.field("planted", f.what.fault == plant::early ? "early" : f.what.fault == plant::mixed ? "mixed" : "").close_object();
}

void write_engine(json_writer & out, const std::optional<engine_facts> & facts) {
    out.key("engine");
    if (!facts) {
        out.null();
        return;
    }
    out.open_object().field("build", facts->build).field("model", facts->model).field("n_vocab", facts->n_vocab);
    out.field("n_ctx", facts->n_ctx).field("n_ctx_seq", facts->n_ctx_seq).field("n_outputs_max", facts->n_outputs);
    out.field("devices", facts->devices).field("load_us", facts->load_us).close_object();
}

void write_times(json_writer & out, const run_record & run) {
    int64_t prefill_us = 0;
    int64_t prefill_cpu_us = 0;
    int64_t generate_us = 0;
    int64_t span_end = 0;
    for (const batch_record & b : run.batches) {
        const int64_t spent = b.t_end_us - b.t_start_us;
        if (b.what.n_prompt() > 0) {
            prefill_us += spent;
            prefill_cpu_us += b.cpu_us;
            span_end = b.t_end_us;
        } else {
            generate_us += spent;
        }
    }
    const int64_t begin = run.batches.empty() ? 0 : run.batches.front().t_start_us;
    out.key("times").open_object();
    out.field("total_prefill_us", prefill_us).field("prefill_cpu_us", prefill_cpu_us).field("prefill_span_us", std::max<int64_t>(0, span_end - begin));
    out.field("generate_us", generate_us).field("draft_us", run.draft_us).field("makespan_us", run.t_end_us).close_object();
}

void write_requests(json_writer & out, const flags & f, const run_record & run) {
    out.key("requests").open_array();
    for (size_t i = 0; i < run.requests.size(); ++i) {
        const request_record & r = run.requests[i];
        out.open_object().field("request", (int) i).field("slot", r.slot).field("cohort", r.cohort).field("length", f.what.lengths[i]);
        out.field("t_admit_us", r.t_admit_us).field("t_prompt_done_us", r.t_prompt_done_us);
        out.field("t_first_token_us", r.t_first_token_us).field("t_end_us", r.t_end_us);
        out.key("barrier_wait_us");
        if (r.t_first_token_us >= 0) {
            out.value(r.t_first_token_us - r.t_prompt_done_us);
        } else {
            out.null();
        }
        out.field("tokens", r.tokens).field("hash", hex(hash_tokens(r.tokens))).field("first_row_hash", hex(r.first_row_hash));
        out.field("smallest_gap", r.smallest_gap).field("drafted", r.drafted).close_object();
    }
    out.close_array();
}

void write_trace(json_writer & out, const flags & f, const run_record & run) {
    out.key("trace").open_array();
    for (size_t i = 0; i < run.batches.size(); ++i) {
        const batch_record & b = run.batches[i];
        out.open_object().field("batch", (int) i).field("t_start_us", b.t_start_us).field("t_end_us", b.t_end_us);
        out.field("cpu_us", b.cpu_us);
        out.field("policy", name(f.what.pol)).field("phase", name(b.what.ph)).field("cohort", b.what.cohort);
        out.field("prompt_tokens", b.what.n_prompt()).field("generated_tokens", b.what.n_generated()).key("seqs").open_array();
        for (const chunk & c : b.what.chunks) {
            out.open_object().field("slot", c.slot).field("request", c.request).field("pos", c.pos).field("tokens", c.n);
            out.field("kind", c.prompt ? "prompt" : "generated").field("ends_prompt", c.ends_prompt).close_object();
        }
        out.close_array().close_object();
    }
    out.close_array();
}

void write_events(json_writer & out, const run_record & run) {
    out.key("events").open_array();
    for (const event_record & e : run.events) {
        out.open_object().field("t_us", e.t_us).field("event", e.event).field("request", e.request);
        out.field("slot", e.slot).field("cohort", e.cohort).close_object();
    }
    out.close_array();
}

} // namespace

uint64_t hash_tokens(const std::vector<int> & tokens, uint64_t seed) {
    uint64_t hash = seed;
    for (const int token : tokens) {
        for (int shift = 0; shift < 32; shift += 8) {
            hash = (hash ^ (((uint32_t) token >> shift) & 0xff)) * 0x100000001b3ull;
        }
    }
    return hash;
}

std::string hex(uint64_t value) {
    char text[17];
    snprintf(text, sizeof text, "%016" PRIx64, value);
    return text;
}

std::string report(const flags & f, const std::optional<engine_facts> & facts, const run_record & run, const std::optional<failure> & failed) {
    json_writer out;
    out.open_object().field("format", 1).field("program", "llama-phase-harness");
    out.field("ok", !failed && run.complete).field("dry_run", f.dry_run).key("failure");
    if (failed) {
        out.open_object().field("kind", failed->kind).field("name", failed->name).field("message", failed->message).close_object();
    } else {
        out.null();
    }
    write_config(out, f);
    write_engine(out, facts);
    uint64_t hash = hash_tokens({});
    for (const request_record & r : run.requests) {
        hash = hash_tokens(r.tokens, hash);
    }
    out.field("hash", hex(hash));
    out.key("work").open_object().field("prompt_tokens", run.done.prompt).field("sampled_tokens", run.done.generated);
    out.field("decoded_generated_tokens", run.done.fed).field("batches", (int64_t) run.batches.size()).close_object();
    out.key("invariants").open_object().field("checked", invariants_of(f.what.pol));
    out.field("batches", (int64_t) run.batches.size()).field("samples", run.samples).close_object();
    write_times(out, run);
    // a dry run says nothing about memory, and the same one gives the same report
    out.key("memory").open_object().field("peak_rss_bytes", f.dry_run ? (int64_t) 0 : peak_rss_bytes()).close_object();
    write_requests(out, f, run);
    write_events(out, run);
    write_trace(out, f, run);
    out.close_object();
    return out.text() + "\n";
}

void write_atomically(const std::string & path, const std::string & text) {
    const std::string part = path + "." + std::to_string(getpid()) + ".part";
    FILE * file = fopen(part.c_str(), "wb");
    bool good = file != nullptr;
    if (good) {
        good = fwrite(text.data(), 1, text.size(), file) == text.size();
        good = fclose(file) == 0 && good;
    }
    if (!good || rename(part.c_str(), path.c_str()) != 0) {
        const std::string why = strerror(errno);
        remove(part.c_str());
        throw engine_error("report", "--json " + path, why);
    }
}

} // namespace harness

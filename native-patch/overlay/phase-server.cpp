#include "phase-server.h"

#include "phase-machine.h"

#include <algorithm>
#include <cctype>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sstream>

static bool equal_ignoring_case(const std::string & a, const char * b) {
    return a.size() == std::strlen(b) && std::equal(a.begin(), a.end(), b, [](unsigned char x, unsigned char y) {
        return std::tolower(x) == std::tolower(y);
    });
}

// nullopt if the text is anything but digits, or too long for a sensible number
static std::optional<int64_t> parse_digits(const std::string & text) {
    if (text.empty() || text.size() > 18 || !std::all_of(text.begin(), text.end(), [](unsigned char c) { return std::isdigit(c); })) {
        return std::nullopt;
    }
    return std::stoll(text);
}

server_phase_tag server_phase_tag::from_headers(const std::map<std::string, std::string> & headers) {
    constexpr size_t  max_request = 64;
    constexpr int64_t max_gather  = 1000;

    server_phase_tag res;
    for (const auto & [key, value] : headers) {
        if (equal_ignoring_case(key, "x-request-id")) {
            for (const unsigned char c : value) {
                if (res.request.size() < max_request && c < 128 && (std::isalnum(c) || c == '.' || c == '_' || c == '-')) {
                    res.request.push_back((char) c);
                }
            }
        } else if (equal_ignoring_case(key, "x-phase-gather-ms")) {
            const auto ms = parse_digits(value);
            res.gather_ms = ms && *ms <= max_gather ? (int32_t) *ms : -1;
        }
    }
    return res;
}

int64_t server_phase_tag::parse_since(const std::string & text) {
    return parse_digits(text).value_or(-1);
}

void server_phase_metrics::update(const phase::machine & machine, int64_t now) {
    switch (machine.state()) {
        case phase::engine::idle:     state = 0; break;
        case phase::engine::prefill:  state = machine.sealed() ? 2 : 1; break;
        case phase::engine::generate: state = 3; break;
    }
    n_queued   = machine.count(phase::member::queued);
    n_prefill  = machine.count(phase::member::prefill);
    n_ready    = machine.count(phase::member::ready);
    n_generate = machine.count(phase::member::generate);
    n_paused   = machine.count(phase::member::paused);
    sums       = machine.sums(now);
}

std::string server_phase_metrics::to_text() const {
    std::stringstream out;
    const auto add = [&out](const char * type, const char * name, const char * help, double value) {
        out << "# HELP llamacpp:" << name << " " << help  << "\n"
            << "# TYPE llamacpp:" << name << " " << type  << "\n"
            << "llamacpp:"        << name << " " << value << "\n";
    };
    out.precision(15);

    add("counter", "phase_prefill_total",  "Prefill phases begun",  (double) sums.n_prefill);
    add("counter", "phase_generate_total", "Generate phases begun", (double) sums.n_generate);
    add("counter", "phase_yield_total",    "Times that running answers paused for queued prompts", (double) sums.n_yield);
    add("counter", "phase_prefill_seconds_total",  "Time spent in the prefill phase",  sums.prefill_us  / 1e6);
    add("counter", "phase_generate_seconds_total", "Time spent in the generate phase", sums.generate_us / 1e6);
    add("counter", "phase_wait_seconds_total",   "Time that slots spent at the barrier, summed over slots", sums.wait_us / 1e6);
    add("counter", "phase_queue_seconds_total",  "Time that slots spent queued for a cohort, summed over slots", sums.queue_us / 1e6);
    add("counter", "phase_paused_seconds_total", "Time that slots spent paused, summed over slots", sums.paused_us / 1e6);
    add("counter", "decode_prompt_batches_total",   "Decode calls that held prompt tokens", (double) n_prompt_batches);
    add("counter", "decode_generate_batches_total", "Decode calls that held generated tokens", (double) n_generate_batches);
    add("counter", "decode_mixed_batches_total",    "Decode calls that held both, stays 0 unless the policy is mixed", (double) n_mixed_batches);
    add("counter", "phase_early_tokens_total",      "Tokens sampled while a prompt of the cohort was unfinished, stays 0 unless the policy is mixed", (double) n_early_tokens);

    add("gauge", "phase_state", "0 idle, 1 prefill open, 2 prefill sealed, 3 generate", state);
    add("gauge", "phase_members_queued",   "Slots queued for a later cohort", (double) n_queued);
    add("gauge", "phase_members_prefill",  "Slots that process their prompt", (double) n_prefill);
    add("gauge", "phase_members_ready",    "Slots that wait at the barrier", (double) n_ready);
    add("gauge", "phase_members_generate", "Slots that generate", (double) n_generate);
    add("gauge", "phase_members_paused",   "Slots that paused for queued prompts", (double) n_paused);

    return out.str();
}

server_phase_trace::server_phase_trace() {
    const char * path = std::getenv("LLAMA_PHASE_TRACE");
    if (path == nullptr || *path == '\0') {
        return;
    }
    file = std::strcmp(path, "stderr") == 0 ? stderr : std::fopen(path, "a");
    if (file == nullptr) {
        std::fprintf(stderr, "LLAMA_PHASE_TRACE: cannot open '%s', no trace is written\n", path);
    }
}

server_phase_trace::~server_phase_trace() {
    if (file != nullptr && file != stderr) {
        std::fclose((FILE *) file);
    }
}

void server_phase_trace::view(const phase::machine & machine, const char * kind, const std::vector<server_phase_share> & shares, int64_t now) {
    if (file == nullptr) {
        return;
    }
    int n_prompt   = 0;
    int n_generate = 0;
    std::string slots;
    for (size_t i = 0; i < shares.size(); i++) {
        const int n = shares[i].n_prompt + shares[i].n_generate;
        n_prompt   += shares[i].n_prompt;
        n_generate += shares[i].n_generate;
        if (n > 0) {
            slots += "," + std::to_string(i) + ":" + std::to_string(n);
        }
    }
    std::fprintf((FILE *) file, "view t_us=%" PRId64 " kind=%s engine=%s sealed=%d cohort=%" PRIu64 " prompt=%d generated=%d slots=%s\n",
            now, kind, phase::name(machine.state()), machine.sealed() ? 1 : 0, machine.cohort(), n_prompt, n_generate,
            slots.empty() ? "" : slots.c_str() + 1);
    std::fflush((FILE *) file);
}

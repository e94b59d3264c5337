#include "flags.h"

#include "invariants.h"

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <map>

namespace harness {

namespace {

constexpr int MAX_TOKENS  = 1 << 24;
constexpr int CTX_ROUNDED = 256; // the engine pads a sequence's context to this

std::vector<std::string> split(const std::string & text) {
    std::vector<std::string> parts(1);
    for (const char c : text) {
        if (c == ',') {
            parts.emplace_back();
        } else {
            parts.back() += c;
        }
    }
    return parts;
}

int64_t whole(const std::string & flag, const std::string & text, int64_t least, int64_t most) {
    char * end = nullptr;
    errno = 0;
    const long long value = std::strtoll(text.c_str(), &end, 10);
    if (text.empty() || *end != '\0' || errno != 0 || value < least || value > most) {
        throw flag_error(flag + ": expected a whole number from " + std::to_string(least) + " to " + std::to_string(most) + ", got '" +
                         text + "'");
    }
    return value;
}

int number(const std::string & flag, const std::string & text, int least, int most) {
    return (int) whole(flag, text, least, most);
}

float share(const std::string & flag, const std::string & text) {
    char * end = nullptr;
    const float value = std::strtof(text.c_str(), &end);
    if (text.empty() || *end != '\0' || !(value >= 0.0f) || !std::isfinite(value)) {
        throw flag_error(flag + ": expected numbers of at least 0 separated by commas, got '" + text + "'");
    }
    return value;
}

template <typename T> T choice(const std::string & flag, const std::string & text, const std::map<std::string, T> & known) {
    const auto found = known.find(text);
    if (found == known.end()) {
        std::string names;
        for (const auto & item : known) {
            names += (names.empty() ? "" : ", ") + item.first;
        }
        throw flag_error(flag + ": expected one of " + names + ", got '" + text + "'");
    }
    return found->second;
}

using setter = std::function<void(flags &, const std::string & flag, const std::string & value)>;

const std::map<std::string, setter> & with_value() {
    static const std::map<std::string, policy> policies = [] {
        std::map<std::string, policy> all;
        for (policy p : all_policies()) {
            all[name(p)] = p;
        }
        return all;
    }();
    static const std::map<std::string, setter> known = {
        { "--model", [](flags & f, const auto &, const auto & v) { f.model = v; } },
        { "--policy", [](flags & f, const auto & n, const auto & v) { f.what.pol = choice(n, v, policies); } },
        { "--lengths", [](flags & f, const auto & n, const auto & v) {
             f.what.lengths.clear();
             for (const std::string & part : split(v)) {
                 f.what.lengths.push_back(number(n, part, 1, MAX_TOKENS));
             }
         } },
        { "--predict", [](flags & f, const auto & n, const auto & v) { f.what.predict = number(n, v, 1, MAX_TOKENS); } },
        { "--slots", [](flags & f, const auto & n, const auto & v) { f.what.slots = number(n, v, 1, 256); } },
        { "--batch", [](flags & f, const auto & n, const auto & v) { f.what.batch = number(n, v, 1, MAX_TOKENS); } },
        { "--ubatch", [](flags & f, const auto & n, const auto & v) { f.ubatch = number(n, v, 1, MAX_TOKENS); } },
        { "--cache", [](flags & f, const auto & n, const auto & v) {
             f.cache = choice<cache_type>(n, v, { { "f16", cache_type::f16 }, { "f32", cache_type::f32 }, { "q8_0", cache_type::q8_0 } });
         } },
        { "--flash-attn", [](flags & f, const auto & n, const auto & v) {
             f.flash = choice<flash_attn>(n, v, { { "auto", flash_attn::automatic }, { "on", flash_attn::on }, { "off", flash_attn::off } });
         } },
        { "--threads", [](flags & f, const auto & n, const auto & v) { f.threads = number(n, v, 1, 512); } },
        { "--gpu-layers", [](flags & f, const auto & n, const auto & v) { f.gpu_layers = v == "all" ? -1 : number(n, v, 0, 10000); } },
        { "--tensor-split", [](flags & f, const auto & n, const auto & v) {
             f.tensor_split.clear();
             for (const std::string & part : split(v)) {
                 f.tensor_split.push_back(share(n, part));
             }
         } },
        { "--ctx", [](flags & f, const auto & n, const auto & v) { f.ctx = number(n, v, 0, 2000000000); } },
        { "--seed", [](flags & f, const auto & n, const auto & v) { f.seed = whole(n, v, 0, INT64_MAX); } },
        { "--mtp-draft", [](flags & f, const auto & n, const auto & v) { f.mtp_draft = number(n, v, 1, 64); } },
        { "--memory-limit-mib", [](flags & f, const auto & n, const auto & v) { f.memory_mib = number(n, v, 0, 1 << 30); } },
        { "--json", [](flags & f, const auto &, const auto & v) { f.json = v; } },
        { "--plant", [](flags & f, const auto & n, const auto & v) {
             f.what.fault = choice<plant>(n, v, { { "early", plant::early }, { "mixed", plant::mixed } });
         } },
    };
    return known;
}

const std::map<std::string, std::function<void(flags &)>> & switches() {
    static const std::map<std::string, std::function<void(flags &)>> known = {
        { "--mtp", [](flags & f) { f.mtp = true; } },
        { "--kv-unified", [](flags & f) { f.kv_unified = true; } },
        { "--dry-run", [](flags & f) { f.dry_run = true; } },
        { "--verbose", [](flags & f) { f.verbose = true; } },
        { "--help", [](flags & f) { f.help = true; } },
        { "-h", [](flags & f) { f.help = true; } },
    };
    return known;
}

void check_context(const flags & f) {
    const int64_t slots = f.what.slots;
    if (f.kv_unified) {
        if (f.ctx < f.longest() * slots) {
            throw flag_error("--ctx: " + std::to_string(f.ctx) + " tokens hold not all sequences; " + std::to_string(f.longest() * slots) +
                             " do");
        }
    } else if (f.ctx / slots < f.longest()) {
        throw flag_error("--ctx: " + std::to_string(f.ctx) + " tokens over " + std::to_string(slots) + " slots hold not a sequence of " +
                         std::to_string(f.longest()) + "; " + std::to_string(f.longest() * slots) + " do");
    }
}

void check(const flags & f) {
    const plan & p = f.what;
    if (p.lengths.empty()) {
        throw flag_error("--lengths is missing: the prompts' lengths in tokens, such as --lengths 16,96");
    }
    if (f.model.empty() && !f.dry_run) {
        throw flag_error("--model is missing: a GGUF file, or --dry-run to check the schedule alone");
    }
    if (p.batch < p.slots) {
        throw flag_error("--batch: " + std::to_string(p.batch) + " is less than one token for each of " + std::to_string(p.slots) +
                         " slots (--slots)");
    }
    if (f.ubatch > p.batch) {
        throw flag_error("--ubatch: " + std::to_string(f.ubatch) + " is more than --batch " + std::to_string(p.batch));
    }
    if (f.cache == cache_type::q8_0 && f.flash == flash_attn::off) {
        throw flag_error("--cache: q8_0 values need flash attention; leave out --flash-attn off");
    }
    if (f.mtp && (int) p.lengths.size() > p.slots) {
        // the draft state of a sequence outlives its request, so a second cohort would depend on who had the slot before
        throw flag_error("--mtp: takes one cohort only; give --slots " + std::to_string(p.lengths.size()) + " or fewer --lengths");
    }
    if (f.ctx != 0) {
        check_context(f);
    }
    if (p.fault != plant::none) {
        try {
            simulate(p);
        } catch (const violation &) {
            return;
        }
        throw flag_error("--plant: this schedule has no place for the fault; take a barrier policy, two prompts in one cohort, and a "
                         "--batch that does not hold them whole");
    }
}

} // namespace

const char * name(cache_type t) {
    switch (t) {
        case cache_type::f16:  return "f16";
        case cache_type::f32:  return "f32";
        case cache_type::q8_0: return "q8_0";
    }
    return "?";
}

const char * name(flash_attn f) {
    switch (f) {
        case flash_attn::automatic: return "auto";
        case flash_attn::on:        return "on";
        case flash_attn::off:       return "off";
    }
    return "?";
}

int flags::longest() const {
    // drafted tokens are decoded behind the sequence before they are dropped
    return *std::max_element(what.lengths.begin(), what.lengths.end()) + what.predict + (mtp ? mtp_draft + 1 : 0);
}

int flags::context() const {
    if (ctx != 0) {
        return ctx;
    }
    const int each = (longest() + CTX_ROUNDED - 1) / CTX_ROUNDED * CTX_ROUNDED;
    return each * what.slots;
}

flags parse_flags(const std::vector<std::string> & arguments) {
    flags f;
    f.what.batch = 2048;
    f.what.slots = 0;
    bool ubatch_given = false;
    for (size_t i = 0; i < arguments.size(); ++i) {
        const std::string & argument = arguments[i];
        const size_t equals = argument.find('=');
        const std::string flag = argument.substr(0, equals);
        if (const auto it = switches().find(flag); it != switches().end()) {
            if (equals != std::string::npos) {
                throw flag_error(flag + " takes no value");
            }
            it->second(f);
            continue;
        }
        const auto it = with_value().find(flag);
        if (it == with_value().end()) {
            throw flag_error("unknown flag " + flag + "; see --help");
        }
        if (equals == std::string::npos && i + 1 == arguments.size()) {
            throw flag_error(flag + ": the value is missing");
        }
        it->second(f, flag, equals == std::string::npos ? arguments[++i] : argument.substr(equals + 1));
        ubatch_given = ubatch_given || flag == "--ubatch";
    }
    if (f.help) {
        return f;
    }
    if (f.what.slots == 0) {
        f.what.slots = std::max<int>(1, (int) f.what.lengths.size());
    }
    if (!ubatch_given) {
        f.ubatch = std::min(f.ubatch, f.what.batch);
    }
    check(f);
    return f;
}

const char * usage() {
    return R"(usage: llama-phase-harness --model FILE --lengths N,N,... [flags]

Decodes prompts of the given lengths and generates from them under one scheduling policy, with real batches on libllama and
without HTTP. Checks its invariants in every run. Loading and tokenizing are outside the timed intervals.

  --model FILE          GGUF file
  --policy P            mixed, barrier-greedy, barrier-fair (default) or barrier-serial
  --lengths N,N,...     prompt lengths in tokens, one per request, in order of arrival
  --predict N           tokens generated per request (default 1)
  --slots N             sequences at once (default: one per request); more requests than slots form several cohorts
  --batch N             most tokens of one decode call (default 2048)
  --ubatch N            most tokens of one computation (default 512)
  --cache TYPE          type of the KV cache, keys and values: f16 (default), f32 or q8_0
  --flash-attn X        auto (default), on or off
  --kv-unified          one cache for all sequences instead of one each
  --threads N           (default 1)
  --gpu-layers N|all    layers on GPUs (default all; a build without GPU support has none)
  --tensor-split A,B    parts of the model per GPU
  --ctx N               context of all sequences together (default: what the work needs)
  --seed N              chooses the prompts' words (default 1)
  --mtp                 run the model's MTP head over the prompts as the server does, and draft once at the opening
  --mtp-draft N         tokens of that draft (default 3)
  --memory-limit-mib N  most address space to take; what does not fit is reported as a memory failure (default 0: no limit)
  --json FILE           write the report
  --dry-run             schedule and invariants only; no model, times are token counts
  --verbose             show the engine's log

exit status: 0 done, 1 failed, 2 bad flags, 3 an invariant was violated, 4 memory ran out
)";
}

} // namespace harness

#include "llama-engine.h"

#include "prompts.h"
#include "record.h"

#include "build-info.h"
#include "common.h"
#include "ggml-backend.h"
#include "llama-cpp.h"
#include "llama.h"
#include "speculative.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <map>
#include <new>

namespace harness {

namespace {

// what the engine complained about, for messages; its calls only return a null or a number
struct complaints {
    bool        verbose = false;
    std::string text;

    bool of_memory() const {
        for (const char * word : { "alloc", "out of memory", "bad_alloc", "insufficient memory" }) {
            if (text.find(word) != std::string::npos) {
                return true;
            }
        }
        return false;
    }
};

complaints & said() {
    static complaints all;
    return all;
}

void on_log(ggml_log_level level, const char * text, void *) {
    static bool important = false;
    if (level != GGML_LOG_LEVEL_CONT) {
        important = level == GGML_LOG_LEVEL_ERROR;
    }
    if (important && said().text.size() < 4000) {
        said().text += text;
    }
    if (important || said().verbose) {
        fputs(text, stderr);
    }
}

engine_error failed(const std::string & kind, const std::string & stage, const std::string & message) {
    std::string text = message;
    if (!said().text.empty()) {
        text += "; the engine said: " + said().text;
        while (!text.empty() && text.back() == '\n') {
            text.pop_back();
        }
    }
    return engine_error(kind != "decode" && said().of_memory() ? "memory" : kind, stage, text);
}

ggml_type type_of(cache_type t) {
    switch (t) {
        case cache_type::f16:  return GGML_TYPE_F16;
        case cache_type::f32:  return GGML_TYPE_F32;
        case cache_type::q8_0: return GGML_TYPE_Q8_0;
    }
    return GGML_TYPE_F16;
}

llama_flash_attn_type type_of(flash_attn f) {
    switch (f) {
        case flash_attn::automatic: return LLAMA_FLASH_ATTN_TYPE_AUTO;
        case flash_attn::on:        return LLAMA_FLASH_ATTN_TYPE_ENABLED;
        case flash_attn::off:       return LLAMA_FLASH_ATTN_TYPE_DISABLED;
    }
    return LLAMA_FLASH_ATTN_TYPE_AUTO;
}

class llama_engine : public engine {
  public:
    explicit llama_engine(const flags & f) : f(f), params(make_params(f)) {
        const int64_t begin = clock_us();
        load_model();
        make_context();
        if (f.mtp) {
            make_mtp();
        }
        make_prompts();
        warm_up();
        load_us = clock_us() - begin;
    }

    engine_facts facts() const override {
        engine_facts result;
        result.build = llama_build_info();
        char text[128];
        llama_model_desc(model.get(), text, sizeof text);
        result.model = text;
        result.n_vocab = n_vocab;
        result.n_ctx = (int) llama_n_ctx(ctx.get());
        result.n_ctx_seq = (int) llama_n_ctx_seq(ctx.get());
        result.n_outputs = params.n_outputs_max;
        result.load_us = load_us;
        for (size_t i = 0; i < ggml_backend_dev_count(); ++i) {
            result.devices.emplace_back(ggml_backend_dev_name(ggml_backend_dev_get(i)));
        }
        return result;
    }

    int64_t now_us() override { return clock_us(); }

    int64_t cpu_us() override {
        timespec spent;
        clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &spent);
        return (int64_t) spent.tv_sec * 1000000 + spent.tv_nsec / 1000;
    }

    void build(const step & s, const std::function<int(int, int)> & generated) override {
        batch.clear();
        for (const chunk & c : s.chunks) {
            const llama_tokens & prompt = prompts[c.request];
            for (int i = 0; i < c.n; ++i) {
                const int pos = c.pos + i;
                const llama_token token = c.prompt ? prompt[pos] : generated(c.request, pos - (int) prompt.size());
                batch.add(token, pos, c.slot, !c.prompt || (c.ends_prompt && i == c.n - 1));
            }
        }
    }

    std::vector<entry> contents() const override {
        std::vector<entry> result;
        result.reserve(batch.tokens.size());
        for (const common_batch::token & t : batch.tokens) {
            result.push_back({ t.seq_id, t.pos[0] });
        }
        return result;
    }

    void decode() override {
        const int32_t status = llama_process(ctx.get(), LLAMA_PROCESS_TYPE_DECODE, batch.get());
        llama_synchronize(ctx.get());
        check_decode(status);
        // the server does the same after each decode: the draft head sees every token the target saw
        if (spec && !common_speculative_process(spec.get(), batch)) {
            throw failed("decode", "mtp", "the draft head could not process the batch");
        }
        if (spec) {
            llama_synchronize(spec_init->context());
        }
    }

    void retain(int request, int index) override {
        const float * row = llama_get_logits_ith(ctx.get(), index);
        if (row == nullptr) {
            throw failed("decode", "logits", "no logits at index " + std::to_string(index));
        }
        retained[request].assign(row, row + n_vocab);
    }

    sampled_token sample_row(int index) override {
        const float * row = llama_get_logits_ith(ctx.get(), index);
        if (row == nullptr) {
            throw failed("decode", "logits", "no logits at index " + std::to_string(index));
        }
        return best(row);
    }

    sampled_token sample_retained(int request) override {
        const auto it = retained.find(request);
        if (it == retained.end()) {
            throw failed("decode", "logits", "no row was kept for request " + std::to_string(request));
        }
        return best(it->second.data());
    }

    void drop_retained(int request) override { retained.erase(request); }

    std::vector<std::vector<int>> draft(const std::vector<opening> & opened) override {
        std::vector<llama_tokens> drafts(opened.size());
        for (size_t i = 0; i < opened.size(); ++i) {
            const opening & o = opened[i];
            const llama_pos seen = llama_memory_seq_pos_max(llama_get_memory(spec_init->context()), o.slot);
            if (seen != o.pos - 1) {
                throw failed("decode", "mtp", "the draft head saw request " + std::to_string(o.request) + " up to position " +
                             std::to_string(seen) + ", expected " + std::to_string(o.pos - 1));
            }
            common_speculative_begin(spec.get(), o.slot, prompts[o.request]);
            common_speculative_draft_params & d = common_speculative_get_draft_params(spec.get(), o.slot);
            d = {};
            d.drafting = true;
            d.n_max = f.mtp_draft;
            d.pos0 = o.pos;
            d.id_last = o.token;
            d.prompt = &prompts[o.request];
            d.result = &drafts[i];
        }
        std::vector<std::vector<uint8_t>> before;
        if (mtp_needs_copy) {
            for (const opening & o : opened) {
                before.push_back(save(o.slot));
            }
        }
        common_speculative_draft(spec.get());
        for (size_t i = 0; i < opened.size(); ++i) {
            undo_draft(opened[i], mtp_needs_copy ? &before[i] : nullptr);
        }
        return { drafts.begin(), drafts.end() };
    }

    void release(int slot) override {
        llama_memory_seq_rm(llama_get_memory(ctx.get()), slot, -1, -1);
        if (spec) {
            llama_memory_seq_rm(llama_get_memory(spec_init->context()), slot, -1, -1);
        }
    }

  private:
    const flags       f;
    common_params     params;
    llama_model_ptr   model;
    llama_context_ptr ctx;
    common_speculative_init_result_ptr spec_init;
    common_speculative_ptr             spec;
    bool              mtp_needs_copy = false;
    common_batch      batch;
    int               n_vocab = 0;
    int64_t           load_us = 0;
    std::vector<llama_tokens>         prompts;
    std::map<int, std::vector<float>> retained;

    static int64_t clock_us() {
        return std::chrono::duration_cast<std::chrono::microseconds>(std::chrono::steady_clock::now().time_since_epoch()).count();
    }

    static common_params make_params(const flags & f) {
        common_params p;
        p.model.path = f.model;
        p.n_ctx = f.context();
        p.n_parallel = f.what.slots;
        p.n_batch = f.what.batch;
        p.n_ubatch = f.ubatch;
        p.cpuparams.n_threads = f.threads;
        p.cpuparams_batch.n_threads = f.threads;
        p.n_gpu_layers = f.gpu_layers < 0 ? -2 : f.gpu_layers;
        std::copy_n(f.tensor_split.begin(), std::min(f.tensor_split.size(), std::size(p.tensor_split)), p.tensor_split);
        p.cache_type_k = p.cache_type_v = type_of(f.cache);
        p.flash_attn_type = type_of(f.flash);
        p.kv_unified = f.kv_unified;
        p.no_perf = true;
        if (f.mtp) {
            p.speculative.types = { COMMON_SPECULATIVE_TYPE_DRAFT_MTP };
            p.speculative.draft.n_max = f.mtp_draft;
            p.speculative.draft.cache_type_k = p.speculative.draft.cache_type_v = type_of(f.cache);
        }
        // as the server limits them: a row for each last token, and one per drafted token
        const auto limits = common_speculative_get_output_limits(p.n_batch, p.n_parallel, common_speculative_n_max(&p.speculative));
        p.n_outputs_max = std::max(1, limits.total);
        p.n_outputs_max_per_seq = std::max(1, limits.per_seq);
        return p;
    }

    void load_model() {
        if (f.tensor_split.size() > llama_max_devices()) {
            throw engine_error("model", "--tensor-split", "this build knows at most " + std::to_string(llama_max_devices()) + " devices");
        }
        model.reset(llama_model_load_from_file(f.model.c_str(), common_model_params_to_llama(params)));
        if (!model) {
            throw failed("model", "model", "cannot load " + f.model);
        }
        n_vocab = llama_vocab_n_tokens(llama_model_get_vocab(model.get()));
    }

    void make_context() {
        ctx.reset(llama_init_from_model(model.get(), common_context_params_to_llama(params)));
        if (!ctx) {
            throw failed("context", "context", "cannot make a context of " + std::to_string(params.n_ctx) + " tokens");
        }
        if ((int) llama_n_ctx_seq(ctx.get()) < f.longest()) {
            throw engine_error("context", "--ctx", "a sequence has room for " + std::to_string(llama_n_ctx_seq(ctx.get())) + " tokens, " +
                               std::to_string(f.longest()) + " are needed");
        }
        batch = common_batch(ctx.get());
    }

    void make_mtp() {
        if (llama_model_n_layer_nextn(model.get()) <= 0) {
            throw engine_error("model", "--mtp", "the model has no MTP head");
        }
        common_params of_draft = common_base_params_to_speculative(params);
        spec_init = common_speculative_init_from_params(of_draft, model.get(), ctx.get());
        if (!spec_init || spec_init->context() == nullptr) {
            throw failed("context", "draft-context", "cannot make the MTP context");
        }
        mtp_needs_copy = common_context_can_seq_rm(spec_init->context()) != COMMON_CONTEXT_SEQ_RM_TYPE_PART;
        params.speculative.draft.ctx_tgt = ctx.get();
        params.speculative.draft.ctx_dft = spec_init->context();
        spec.reset(common_speculative_init(params.speculative, params.n_parallel));
        if (!spec) {
            throw failed("context", "mtp", "cannot set up speculation");
        }
    }

    void make_prompts() {
        std::map<int, uint64_t> seen;
        for (const int length : f.what.lengths) {
            // by length, not by place: the same requests in another order are the same requests
            const uint64_t number = ((uint64_t) length << 16) + seen[length]++;
            llama_tokens tokens;
            for (int words = length; (int) tokens.size() < length; words *= 2) {
                tokens = common_tokenize(ctx.get(), prompt_text(f.seed, number, words), true, false);
            }
            tokens.resize(length);
            prompts.push_back(tokens);
        }
    }

    // touches weights and buffers once, so that the first timed batch is like the others
    void warm_up() {
        const llama_tokens & longest = *std::max_element(prompts.begin(), prompts.end(),
                                                         [](const auto & a, const auto & b) { return a.size() < b.size(); });
        const int n = std::min((int) longest.size(), f.what.batch);
        for (int i = 0; i < n; ++i) {
            batch.add(longest[i], i, 0, i == n - 1);
        }
        const int32_t status = llama_process(ctx.get(), LLAMA_PROCESS_TYPE_DECODE, batch.get());
        llama_synchronize(ctx.get());
        check_decode(status);
        llama_memory_clear(llama_get_memory(ctx.get()), true);
        batch.clear();
    }

    static void check_decode(int32_t status) {
        if (status == 1) {
            throw failed("memory", "kv-cache", "no room for the batch; a larger --ctx has it");
        }
        if (status == -2) {
            throw failed("memory", "compute", "memory for the computation could not be had");
        }
        if (status != 0) {
            throw failed("decode", "decode", "the engine returned " + std::to_string(status));
        }
    }

    sampled_token best(const float * row) const {
        int first = 0;
        for (int i = 1; i < n_vocab; ++i) {
            if (row[i] > row[first]) {
                first = i;
            }
        }
        float second = -INFINITY;
        for (int i = 0; i < n_vocab; ++i) {
            if (i != first && row[i] > second) {
                second = row[i];
            }
        }
        sampled_token result;
        result.id = first;
        result.gap = n_vocab > 1 ? (double) row[first] - (double) second : 0.0;
        std::vector<int> bits(n_vocab);
        memcpy(bits.data(), row, sizeof(float) * n_vocab);
        result.hash = hash_tokens(bits);
        return result;
    }

    std::vector<uint8_t> save(int slot) const {
        llama_context * draft = spec_init->context();
        std::vector<uint8_t> state(llama_state_seq_get_size(draft, slot));
        llama_state_seq_get_data(draft, state.data(), state.size(), slot);
        return state;
    }

    void undo_draft(const opening & o, const std::vector<uint8_t> * before) {
        llama_context * draft = spec_init->context();
        if (before == nullptr) {
            if (!llama_memory_seq_rm(llama_get_memory(draft), o.slot, o.pos, -1)) {
                throw failed("decode", "mtp", "the draft of request " + std::to_string(o.request) + " could not be dropped");
            }
            return;
        }
        llama_memory_seq_rm(llama_get_memory(draft), o.slot, -1, -1);
        if (llama_state_seq_set_data(draft, before->data(), before->size(), o.slot) == 0) {
            throw failed("decode", "mtp", "the state before the draft of request " + std::to_string(o.request) + " could not be restored");
        }
    }
};

} // namespace

std::unique_ptr<engine> make_llama_engine(const flags & f) {
    said().verbose = f.verbose;
    llama_log_set(on_log, nullptr);
    ggml_backend_load_all();
    llama_backend_init();
    try {
        return std::make_unique<llama_engine>(f);
    } catch (const std::bad_alloc &) {
        throw engine_error("memory", "host", "memory ran out while loading");
    }
}

} // namespace harness

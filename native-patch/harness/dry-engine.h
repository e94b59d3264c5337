#pragma once

// An engine without a model, for --dry-run: its tokens depend on request and position only, its clock counts decoded tokens.

#include "engine.h"

namespace harness {

class dry_engine : public engine {
  public:
    engine_facts facts() const override {
        engine_facts result;
        result.model = "none";
        return result;
    }

    int64_t now_us() override { return clock; }

    int64_t cpu_us() override { return clock; }

    void build(const step & s, const std::function<int(int, int)> & generated) override {
        batch.clear();
        owners.clear();
        for (const chunk & c : s.chunks) {
            for (int i = 0; i < c.n; ++i) {
                batch.push_back({ c.slot, c.pos + i });
                owners.push_back(c.request);
            }
            if (!c.prompt) {
                generated(c.request, 0);
            }
        }
    }

    std::vector<entry> contents() const override { return batch; }

    void decode() override { clock += (int64_t) batch.size(); }

    void retain(int, int) override {}

    sampled_token sample_row(int index) override { return token(owners[index], batch[index].pos); }

    sampled_token sample_retained(int request) override { return token(request, 0); }

    void drop_retained(int) override {}

    std::vector<std::vector<int>> draft(const std::vector<opening> & opened) override {
        return std::vector<std::vector<int>>(opened.size());
    }

    void release(int) override {}

  private:
    std::vector<entry> batch;
    std::vector<int>   owners;
    int64_t            clock = 0;

    static sampled_token token(int request, int pos) {
        sampled_token t;
        t.id = (request * 31 + pos) % 1000;
        return t;
    }
};

} // namespace harness

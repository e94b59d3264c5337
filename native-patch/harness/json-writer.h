#pragma once

// Writes JSON as text, in order. Small, so that the pure part of the harness builds without any library.

#include <cstdint>
#include <cstdio>
#include <string>
#include <string_view>
#include <vector>

namespace harness {

class json_writer {
  public:
    json_writer & open_object() { return open('{'); }
    json_writer & open_array()  { return open('['); }
    json_writer & close_object() { return close('}'); }
    json_writer & close_array()  { return close(']'); }

    json_writer & key(std::string_view name) {
        comma();
        quote(name);
        out += ": ";
        after_key = true;
        return *this;
    }

    json_writer & value(std::string_view text) {
        comma();
        quote(text);
        return *this;
    }
    json_writer & value(const char * text) { return value(std::string_view(text)); }
    json_writer & value(bool yes) { return raw(yes ? "true" : "false"); }
    json_writer & value(int number) { return raw(std::to_string(number)); }
    json_writer & value(int64_t number) { return raw(std::to_string(number)); }
    json_writer & value(double number) {
        char text[32];
        snprintf(text, sizeof text, "%.9g", number);
        return raw(text);
    }
    json_writer & null() { return raw("null"); }

    template <typename T> json_writer & field(std::string_view name, const T & what) {
        key(name);
        return value(what);
    }
    template <typename T> json_writer & field(std::string_view name, const std::vector<T> & items) {
        key(name).open_array();
        for (const T & item : items) {
            value(item);
        }
        return close_array();
    }

    const std::string & text() const { return out; }

  private:
    std::string       out;
    std::vector<bool> filled;
    bool              after_key = false;

    void comma() {
        if (after_key) {
            after_key = false;
            return;
        }
        if (!filled.empty()) {
            if (filled.back()) {
                out += ", ";
            }
            filled.back() = true;
            if (filled.size() <= 2) {
                out += '\n';
            }
        }
    }

    json_writer & open(char c) {
        comma();
        out += c;
        filled.push_back(false);
        return *this;
    }

    json_writer & close(char c) {
        filled.pop_back();
        out += c;
        return *this;
    }

    json_writer & raw(std::string_view text) {
        comma();
        out += text;
        return *this;
    }

    void quote(std::string_view text) {
        out += '"';
        for (const unsigned char c : text) {
            if (c == '"' || c == '\\') {
                out += '\\';
                out += (char) c;
            } else if (c < 0x20 || c >= 0x7f) {
                // names and messages are ASCII; anything else is shown by its bytes, so that the file is always valid
                char escaped[8];
                snprintf(escaped, sizeof escaped, "\\u%04x", c);
                out += escaped;
            } else {
                out += (char) c;
            }
        }
        out += '"';
    }
};

} // namespace harness

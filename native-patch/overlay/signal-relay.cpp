#include "signal-relay.h"

#include <cstdlib>
#include <cstring>
#include <utility>

#if defined(__unix__) || defined(__APPLE__)

#include <atomic>
#include <cerrno>
#include <fcntl.h>
#include <unistd.h>

static constexpr int END_OF_RELAY = 0; // no signal has this number

static std::atomic<int> write_end = -1;

signal_relay::signal_relay(std::function<void(int)> answer) {
    int ends[2];
    if (pipe(ends) != 0) {
        return;
    }
    for (const int end : ends) {
        fcntl(end, F_SETFD, FD_CLOEXEC);
    }
    thread = std::thread([answer = std::move(answer), read_end = ends[0]]() {
        unsigned char signal = END_OF_RELAY;
        for (;;) {
            const ssize_t n = read(read_end, &signal, 1);
            if (n < 0 && errno == EINTR) {
                continue;
            }
            if (n != 1 || signal == END_OF_RELAY) {
                break;
            }
            answer(signal);
        }
        close(read_end);
    });
    write_end = ends[1];
}

signal_relay::~signal_relay() {
    if (!thread.joinable()) {
        return;
    }
    pass(END_OF_RELAY);
    thread.join();
    close(write_end.exchange(-1));
}

bool signal_relay::pass(int signal) {
    const int end = write_end;
    if (end < 0) {
        return false;
    }
    const int  before = errno;
    const auto byte   = (unsigned char) signal;
    ssize_t    n;
    do {
        n = write(end, &byte, 1);
    } while (n < 0 && errno == EINTR);
    errno = before;
    return n == 1;
}

void signal_relay::end_now(const char * text) {
    // nobody is left to be told of a failure
    const ssize_t n = write(STDERR_FILENO, text, strlen(text));
    (void) n;
    _exit(EXIT_FAILURE);
}

#else

#include <cstdio>

signal_relay::signal_relay(std::function<void(int)>) {}

signal_relay::~signal_relay() = default;

bool signal_relay::pass(int) {
    return false;
}

void signal_relay::end_now(const char * text) {
    fputs(text, stderr);
    std::_Exit(EXIT_FAILURE);
}

#endif

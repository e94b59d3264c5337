// A signal handler runs in the middle of whatever its thread was doing, and may wait for nothing that this thread holds. So the
// answer to a signal is given on a thread of its own.
#pragma once

#include <functional>
#include <thread>

class signal_relay {
public:
    // calls answer(signal) for each signal passed on, one after another, until the relay ends; without threads of POSIX it does nothing
    explicit signal_relay(std::function<void(int)> answer);
    ~signal_relay();

    signal_relay(const signal_relay &) = delete;
    signal_relay & operator=(const signal_relay &) = delete;

    // both may be called in a signal handler

    // hand a signal to the relay; false if there is none, then the caller has to answer
    static bool pass(int signal);

    // say something and end the process without any cleaning up
    [[noreturn]] static void end_now(const char * text);

private:
    std::thread thread;
};

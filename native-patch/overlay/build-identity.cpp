#include "build-identity.h"

// Only this file sees the three values, so that a new series hash recompiles one object and not the server.
#ifndef PHASE_BUILD_PIN
#define PHASE_BUILD_PIN "unknown"
#endif
#ifndef PHASE_BUILD_SERIES
#define PHASE_BUILD_SERIES "unknown"
#endif
#ifndef PHASE_BUILD_FLAGS
#define PHASE_BUILD_FLAGS "unknown"
#endif

common_json build_identity_to_json() {
    return common_json {
        { "pin",    PHASE_BUILD_PIN    },
        { "series", PHASE_BUILD_SERIES },
        { "flags",  PHASE_BUILD_FLAGS  },
    };
}

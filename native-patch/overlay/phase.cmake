# Included by tools/server/CMakeLists.txt once the server-context target exists. The overlay is copied flat into
# tools/server/phase/, so a new overlay file is a new line here and never a patch.

target_sources(server-context PRIVATE
    ${CMAKE_CURRENT_LIST_DIR}/build-identity.cpp
    ${CMAKE_CURRENT_LIST_DIR}/build-identity.h
    ${CMAKE_CURRENT_LIST_DIR}/phase-hooks.inc
    ${CMAKE_CURRENT_LIST_DIR}/phase-machine.cpp
    ${CMAKE_CURRENT_LIST_DIR}/phase-machine.h
    ${CMAKE_CURRENT_LIST_DIR}/phase-server.cpp
    ${CMAKE_CURRENT_LIST_DIR}/phase-server.h
    ${CMAKE_CURRENT_LIST_DIR}/phase-totals.h
    ${CMAKE_CURRENT_LIST_DIR}/signal-relay.cpp
    ${CMAKE_CURRENT_LIST_DIR}/signal-relay.h
)

# Given by the build tool; a build without them says "unknown".
set(PHASE_BUILD_PIN    "unknown" CACHE STRING "source package and version of the unpatched tree")
set(PHASE_BUILD_SERIES "unknown" CACHE STRING "hash of the patch series and the overlay")
set(PHASE_BUILD_FLAGS  "unknown" CACHE STRING "build options, for people to read")

set_property(SOURCE ${CMAKE_CURRENT_LIST_DIR}/build-identity.cpp APPEND PROPERTY COMPILE_DEFINITIONS
    "PHASE_BUILD_PIN=\"${PHASE_BUILD_PIN}\""
    "PHASE_BUILD_SERIES=\"${PHASE_BUILD_SERIES}\""
    "PHASE_BUILD_FLAGS=\"${PHASE_BUILD_FLAGS}\""
)

# A test build can instrument the server's own sources and the sampler only: they are what we change, and the rest stays
# fast. The build tool links the sanitizers' runtime everywhere. At -O3 one of these files compiles for minutes.
set(PHASE_SANITIZE "" CACHE STRING "sanitizers for the server's sources, as -fsanitize takes them")

if (PHASE_SANITIZE)
    set(PHASE_SANITIZE_OPTIONS -fsanitize=${PHASE_SANITIZE} -fno-omit-frame-pointer -g1 -O1)
    target_compile_options(server-context PRIVATE ${PHASE_SANITIZE_OPTIONS})
    # For the targets of this directory that are defined after this line.
    add_compile_options(${PHASE_SANITIZE_OPTIONS})
    set_property(SOURCE ${PROJECT_SOURCE_DIR}/common/sampling.cpp TARGET_DIRECTORY llama-common
        APPEND PROPERTY COMPILE_OPTIONS ${PHASE_SANITIZE_OPTIONS})
    if (PHASE_SANITIZE STREQUAL "thread")
        # its atomics order what HTTP threads hand to the server
        set_property(SOURCE ${PROJECT_SOURCE_DIR}/vendor/cpp-httplib/httplib.cpp TARGET_DIRECTORY cpp-httplib
            APPEND PROPERTY COMPILE_OPTIONS ${PHASE_SANITIZE_OPTIONS})
    endif()
endif()

# Included by tools/server/CMakeLists.txt once the server-context target exists. The overlay is copied flat into
# tools/server/phase/, so a new overlay file is a new line here and never a patch.

target_sources(server-context PRIVATE
    ${CMAKE_CURRENT_LIST_DIR}/build-identity.cpp
    ${CMAKE_CURRENT_LIST_DIR}/build-identity.h
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

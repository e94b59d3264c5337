# The scheduling harness: one program on libllama, no part of the server. Runs in the scope of the tree's top directory.

set(HARNESS_DIR ${CMAKE_SOURCE_DIR}/tools/phase-harness)

add_executable(llama-phase-harness
    ${HARNESS_DIR}/drive.cpp
    ${HARNESS_DIR}/flags.cpp
    ${HARNESS_DIR}/invariants.cpp
    ${HARNESS_DIR}/llama-engine.cpp
    ${HARNESS_DIR}/main.cpp
    ${HARNESS_DIR}/prompts.cpp
    ${HARNESS_DIR}/record.cpp
    ${HARNESS_DIR}/schedule.cpp
)
target_link_libraries(llama-phase-harness PRIVATE llama-common llama ${CMAKE_THREAD_LIBS_INIT})
target_compile_features(llama-phase-harness PRIVATE cxx_std_17)

if (PHASE_SANITIZE)
    target_compile_options(llama-phase-harness PRIVATE -fsanitize=${PHASE_SANITIZE} -fno-omit-frame-pointer -g1)
endif()

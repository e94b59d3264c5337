# Read by CMake after each project() call. Adds the harness when everything else of the tree is known, without a line changed
# in it: the harness is no part of the series, and no engine's identity depends on it.

if (CMAKE_CURRENT_SOURCE_DIR STREQUAL CMAKE_SOURCE_DIR)
    if (CMAKE_VERSION VERSION_LESS 3.19)
        message(FATAL_ERROR "the harness needs CMake 3.19 or newer, this is ${CMAKE_VERSION}")
    endif()
    cmake_language(DEFER CALL include tools/phase-harness/harness.cmake)
endif()

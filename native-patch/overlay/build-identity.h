// Which source and which options this engine was built from, as GET /props shows it.
#pragma once

#include "json.h"

// {"pin": source package and version, "series": hash of the patch series and this overlay, "flags": build options}
common_json build_identity_to_json();

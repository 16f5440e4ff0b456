from __future__ import annotations

import os

# Every pass of every test is held to the slow rules as well, in ranks that tests start too;
# OVERLAP_VERIFY= in front of pytest turns that off.
os.environ.setdefault("OVERLAP_VERIFY", "deep")

from __future__ import annotations

import os

# Every pass of every test is held to the slow rules as well, in ranks that tests start too.
os.environ["OVERLAP_VERIFY"] = "deep"

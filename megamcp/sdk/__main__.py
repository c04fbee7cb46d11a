"""`python -m megamcp.sdk ENTRY --socket PATH`: a tool server as the gateway's child."""

import sys

from megamcp.sdk.process import main

sys.exit(main())

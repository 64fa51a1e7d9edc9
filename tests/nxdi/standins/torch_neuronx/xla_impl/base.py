# SPDX-License-Identifier: Apache-2.0
"""Stand-in: operations that build HLO by hand are importable, not callable."""

import _absent

xla_call = xla_hlo_call = _absent.decorator

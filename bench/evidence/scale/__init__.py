# SPDX-License-Identifier: Apache-2.0
"""How large can it be: what ranks ask of the rendezvous store, counted, and extrapolated to thousands of ranks."""

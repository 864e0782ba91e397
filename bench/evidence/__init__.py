# SPDX-License-Identifier: Apache-2.0
"""Evidence for maintainers: what the claims of the documents rest on."""

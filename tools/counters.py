"""SGLang's own counters on a server's `/metrics` page."""

import re

BACKUP_TOKENS = "sglang:hicache_backup_tokens_total"
BACKUP_BYTES = "sglang:hicache_backup_bytes_total"
RESTORE_TOKENS = "sglang:load_back_tokens_total"
RESTORE_BYTES = "sglang:load_back_bytes_total"
L2_TOKENS = "sglang:hicache_host_total_tokens"
L2_USED_TOKENS = "sglang:hicache_host_used_tokens"


def metric(page: str, name: str) -> float:
    """Sum of a counter or gauge over its label sets; 0 if the page does not have it."""
    return sum(float(value) for value in re.findall(rf"^{re.escape(name)}(?:{{.*}})? (\S+)$", page, re.M))

"""What would a smaller representation gain? Replays a trace of requests through SGLang's two cache tiers.

    trace       one request a line -> Request
    cache       PrefixCache: SGLang's radix tree, L1 and L2, as counts of tokens
    replay      a trace through one PrefixCache -> Totals
                every representation at every host budget -> Plan
    plot        a Plan as hit rate against host gigabytes

No KV, no model and no SGLang is involved; `docs/planning.md` says which of SGLang's rules are followed and which of a
server's circumstances are left out.
"""

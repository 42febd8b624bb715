import time
T0=time.time()
from tests.distributed.test_fsdp import *
T1=time.time()
import cProfile, pstats, io
def prof(*a):
    p=cProfile.Profile(); s=time.time(); p.enable(); r=on_rank(*a); p.disable()
    o=io.StringIO(); pstats.Stats(p,stream=o).sort_stats("cumtime").print_stats(45)
    return [T1-T0, time.time()-s, o.getvalue()]
if __name__=="__main__":
    tr=packed_for_travel(traces_as_sampled("qwen3_moe", s) for s in range(4))
    for i in range(2):
        s=time.time(); r=run_ranks(2,prof,"qwen3_moe","transformers","after",tr); print(time.time()-s, r[0][:2])
    print(r[0][2][:8000])

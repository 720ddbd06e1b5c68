"""The trainer's steps on rows in a real TransferQueue: padding, deal, advantages, metrics."""

import pytest
import transfer_queue as tq
from stored import Ranks, make_config, make_trainer, put_sessions, ragged_sessions

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.usefixtures("queue")]


@pytest.mark.parametrize("kind", ["text", "images", "experts"])
def test_padding_rows_have_every_field_of_the_real_ones(kind, tmp_path):
    trainer = make_trainer(make_config(tmp_path), Ranks(4))
    batch = put_sessions(ragged_sessions(), kind=kind, extra=True)
    metrics = {}
    whole = trainer._balance_batch(batch, metrics)
    print(len(batch), len(whole), metrics)
    num = len(whole) - len(batch)
    data = tq.kv_batch_get(keys=whole.keys, partition_id="train")
    one = tq.kv_batch_get(keys=[batch.keys[0]], partition_id="train")
    print(sorted(one.keys()))
    print(sorted(data.keys()))
    assert set(data.keys()) == set(one.keys())
    pad = tq.kv_batch_get(keys=[whole.keys[-1]], partition_id="train")[0]
    print({k: pad[k] for k in pad.keys()})
    assert num > 0
    whole2 = trainer._compute_advantage(whole, metrics)
    trainer.timing_raw = {}
    print(metrics)
    assert 0

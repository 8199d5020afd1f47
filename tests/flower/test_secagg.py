"""What stands between Coterie's messages and Flower's secure aggregation (SecAgg+), by trying.

Each test is an obstacle that docs/privacy.md names. One that fails says that an obstacle is gone.
"""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("flwr", reason="needs pip install 'coterie[flower]'")

from flwr.app import ConfigRecord, Context, RecordDict
from flwr.client.mod import secaggplus_mod
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from flwr.compat.common.recorddict_compat import recorddict_to_fitres
from flwr.server.workflow import SecAggPlusWorkflow

from coterie.client.steps import train
from coterie.engines.flower import wire
from coterie.engines.flower.site import Site
from coterie.methods.fedavg import FedAvg
from tests.flower.test_site import request
from tests.helpers import setup_of


@pytest.fixture
def setup():
    return setup_of(FedAvg())


def context() -> Context:
    return Context(1, 1, {}, RecordDict(), {})


def asked(setup) -> RecordDict:
    return request(setup, train.wire_name, 1, [setup.task().initial.double()])


def test_the_workflow_takes_only_the_context_of_a_strategy():
    """A ServerApp of messages has a `Context`; the workflow wants the legacy one with strategy and client manager."""
    with pytest.raises(TypeError, match="Expect a LegacyContext"):
        SecAggPlusWorkflow(3, 2)(SimpleNamespace(), context())


def test_the_mod_takes_no_call_of_coterie(setup):
    """Every train message must be a stage of the protocol, so one site cannot do both masked and plain calls."""
    message = SimpleNamespace(content=asked(setup), metadata=SimpleNamespace(message_type="train"))
    with pytest.raises(KeyError, match=RECORD_KEY_CONFIGS):
        secaggplus_mod(message, context(), lambda message, context: message)


def test_the_mod_masks_only_a_fit_result(setup, tmp_path):
    """It masks `parameters` of a FitRes with `num_examples`; an answer of named arrays is none."""
    site = Site(setup.federation(), setup.task().make, setup.task().loss, tmp_path)
    answer = site.answer(asked(setup))
    assert wire.ANSWER in answer
    with pytest.raises(KeyError, match="fitres"):
        recorddict_to_fitres(answer, keep_input=True)


def test_a_cluster_of_one_cannot_be_hidden():
    """The workflow gives up below two clients, and a sum of two tells each of them the other's model."""
    workflow = SecAggPlusWorkflow(1.0, 0.5)
    proxy = SimpleNamespace(node_id=1)
    fit = SimpleNamespace(parameters=SimpleNamespace(tensors=[], tensor_type="numpy.ndarray"), config={})
    state = SimpleNamespace(nid_to_fitins={}, nid_to_proxies={})
    strategy = SimpleNamespace(configure_fit=lambda round, parameters, manager: [(proxy, fit)])
    records = SimpleNamespace(
        config_records={"config": ConfigRecord({"current_round": 1})}, array_records={"parameters": wire.record_of({})}
    )
    legacy = SimpleNamespace(state=records, strategy=strategy, client_manager=SimpleNamespace(num_available=lambda: 1))
    assert workflow.setup_stage(SimpleNamespace(), legacy, state) is False


def test_numbers_are_clipped_and_rounded():
    """What the sum of masked integers can hold: entries in [-8, 8], in 2**22 steps, weights up to 1,000."""
    workflow = SecAggPlusWorkflow(3, 2)
    assert (workflow.clipping_range, workflow.quantization_range, workflow.max_weight) == (8.0, 1 << 22, 1000.0)
    assert workflow.modulus_range // workflow.quantization_range == 1024  # so many clients in one sum

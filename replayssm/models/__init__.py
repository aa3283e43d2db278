"""Models that LMDeploy 0.18.0 lacks."""

from __future__ import annotations

from typing import Any

from replayssm.patching import Patches


def install(patches: Patches) -> None:
    """Make LMDeploy find the models of this package until `patches` is undone."""
    from lmdeploy.pytorch.configurations import AutoModelConfigBuilder
    from lmdeploy.pytorch.models import patch as model_patch
    from lmdeploy.pytorch.spec_decode.proposers.base import BaseSpecProposer
    from lmdeploy.pytorch.spec_decode.spec_agent import SpecModelAgent

    from replayssm.models.glm5_next.config import (
        ARCHITECTURE,
        DRAFT_ARCHITECTURE,
        MODEL_TYPE,
        Glm5NextConfigBuilder,
    )
    from replayssm.models.glm5_next.draft import Glm5NextDraftModel

    # The first builder whose condition holds is taken.
    patches.set(AutoModelConfigBuilder, '_sub_classes', [Glm5NextConfigBuilder, *AutoModelConfigBuilder._sub_classes])
    package = 'replayssm.models.glm5_next'
    added = {
        ARCHITECTURE: f'{package}.model.Glm5NextForConditionalGeneration',
        DRAFT_ARCHITECTURE: f'{package}.draft.Glm5NextDraftModel',
    }
    patches.set(model_patch, 'MODULE_MAP', model_patch.MODULE_MAP | added)

    @patches.wrap(BaseSpecProposer, 'build_model')
    def build_model(build: Any, self: Any, empty_init: bool, target_model: Any = None, **options: Any) -> None:
        build(self, empty_init, target_model=target_model, **options)
        if isinstance(self.model, Glm5NextDraftModel):
            self.model.bind(target_model)

    @patches.wrap(SpecModelAgent, '_prepare_inputs_from_main')
    def prepare_inputs(prepare: Any, self: Any, model_inputs: Any, extra_inputs: Any) -> Any:
        draft_inputs, extra_inputs = prepare(self, model_inputs, extra_inputs)
        if self.model_config.hf_config.model_type == MODEL_TYPE:
            # LMDeploy's draft layers keep no state; this one's tail ring is in the slots of the target.
            draft_inputs.state_offsets = model_inputs.state_offsets
        return draft_inputs, extra_inputs

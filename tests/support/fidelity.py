"""Our small extractors as torch-fidelity's, for parity with its own path from files to scores."""

from torch_fidelity.feature_extractor_base import FeatureExtractorBase
from torch_fidelity.registry import FEATURE_EXTRACTORS_REGISTRY, register_feature_extractor

from lit_diffusion.metrics.extractors import match_channels


def fidelity_arguments(protocol):
    """Arguments that make `torch_fidelity.calculate_metrics` use this protocol's extractor."""

    class Extractor(FeatureExtractorBase):
        def __init__(self, name, features_list, **kwargs):
            super().__init__(name, features_list)
            self.network = protocol.build()

        def forward(self, images):  # torch-fidelity reads grey files as RGB
            features = self.network(match_channels(images, self.network.channels))
            named = {"pooled": features, "logits": self.network.head(features)}
            return tuple(named[key] for key in self.features_list)

        @staticmethod
        def get_provided_features_list():
            return "pooled", "logits"

        @staticmethod
        def get_default_feature_layer_for_metric(metric):
            return "logits" if metric == "isc" else "pooled"

    if protocol.name not in FEATURE_EXTRACTORS_REGISTRY:
        register_feature_extractor(protocol.name, Extractor)
    return {"feature_extractor": protocol.name}

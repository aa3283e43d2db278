"""What the default of a value cannot say: choices, bounds, and Kubernetes' own types."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Schema = dict[str, Any]


def k8s(name: str) -> Schema:
    """Refer to a type of Kubernetes such as `core.v1.Toleration`."""
    return {'$ref': f'#/definitions/io.k8s.api.{name}'}


def list_of(item: Schema) -> Schema:
    return {'type': 'array', 'items': item}


def choice(*values: str) -> Schema:
    return {'enum': list(values)}


TEXT: Schema = {'type': 'string'}
TEXTS = list_of(TEXT)
TEXT_MAP: Schema = {'type': 'object', 'additionalProperties': TEXT}
QUANTITY: Schema = {'type': ['string', 'integer'], 'pattern': r'^[0-9.]+([KMGTPE]i|[numkMGTPE])?$'}
DURATION: Schema = {'type': 'string', 'pattern': r'^([0-9]+(h|m|s|ms))+$'}
PORT: Schema = {'type': 'integer', 'minimum': 1, 'maximum': 65535}
COUNT: Schema = {'type': 'integer', 'minimum': 0}
POSITIVE: Schema = {'type': 'integer', 'minimum': 1}
PERCENT: Schema = {'type': 'integer', 'minimum': 0, 'maximum': 100}
PEERS = list_of(k8s('networking.v1.NetworkPolicyPeer'))
PARENT_REF: Schema = {
    'type': 'object',
    'properties': dict.fromkeys(('group', 'kind', 'name', 'namespace', 'sectionName'), TEXT) | {'port': PORT},
    'required': ['name'],
    'additionalProperties': False,
}


def nullable(schema: Schema) -> Schema:
    return {'anyOf': [schema, {'type': 'null'}]}


SHAPES: Mapping[str, Schema] = {
    'config': {'$ref': '#/definitions/AppConfig'},
    'fullnameOverride': TEXT | {'pattern': '^([a-z]([-a-z0-9]{0,45}[a-z0-9])?)?$'},
    'pullPolicy': choice('Always', 'IfNotPresent', 'Never'),
    'imagePullSecrets': list_of(k8s('core.v1.LocalObjectReference')),
    'serve.port': PORT,
    'logLevel': choice('DEBUG', 'INFO', 'WARNING', 'ERROR'),
    'resources': k8s('core.v1.ResourceRequirements'),
    'sharedMemory': QUANTITY,
    'rayStartParams': TEXT_MAP,
    'labels': TEXT_MAP,
    'annotations': TEXT_MAP,
    'nodeSelector': TEXT_MAP,
    'tolerations': list_of(k8s('core.v1.Toleration')),
    'affinity': k8s('core.v1.Affinity'),
    'topologySpreadConstraints': list_of(k8s('core.v1.TopologySpreadConstraint')),
    'modelCache.type': choice('emptyDir', 'persistentVolumeClaim', 'hostPath'),
    'modelCache.size': QUANTITY,
    'accessModes': list_of(choice('ReadWriteOnce', 'ReadWriteOncePod', 'ReadWriteMany', 'ReadOnlyMany')),
    'env': list_of(k8s('core.v1.EnvVar')),
    'envFrom': list_of(k8s('core.v1.EnvFromSource')),
    'volumes': list_of(k8s('core.v1.Volume')),
    'volumeMounts': list_of(k8s('core.v1.VolumeMount')),
    'podSecurityContext': k8s('core.v1.PodSecurityContext'),
    'securityContext': k8s('core.v1.SecurityContext'),
    'periodSeconds': POSITIVE,
    'failureThreshold': POSITIVE,
    'timeoutSeconds': POSITIVE,
    'apiKeys': list_of(TEXT | {'pattern': r'^\S+$'}),
    'rayAuthentication': choice('token', 'disabled'),
    'idleTimeoutSeconds': POSITIVE,
    'upgradeStrategy.type': choice('NewCluster', 'NewClusterWithIncrementalUpgrade', 'None'),
    'stepSizePercent': PERCENT,
    'intervalSeconds': POSITIVE,
    'maxSurgePercent': PERCENT,
    'deletionDelaySeconds': nullable(COUNT),
    'workerMinAvailable': nullable(COUNT),
    'headMinAvailable': COUNT,
    'apiFrom': PEERS,
    'monitoringFrom': PEERS,
    'operatorFrom': PEERS,
    'egress': nullable(list_of(k8s('networking.v1.NetworkPolicyEgressRule'))),
    'hosts': TEXTS,
    'hostnames': TEXTS,
    'tls': list_of(k8s('networking.v1.IngressTLS')),
    'parentRefs': list_of(PARENT_REF),
    'timeout': DURATION,
    'interval': DURATION,
    'scrapeTimeout': DURATION,
    'extraManifests': list_of({'type': ['object', 'string']}),
}
"""Schemas by whole path, or by the last key where it means the same everywhere."""

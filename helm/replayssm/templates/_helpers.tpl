{{/* Name of everything in the release; KubeRay takes at most 47 characters for a RayService. */}}
{{- define "replayssm.fullname" -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- $full := ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- default $full .Values.fullnameOverride | replace "." "-" | trunc 47 | trimSuffix "-" -}}
{{- end -}}

{{/* Labels of everything but pods: KubeRay would start a new cluster whenever the chart's version changes there. */}}
{{- define "replayssm.labels" -}}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version | replace "+" "_" | trunc 63 }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{ include "replayssm.selectorLabels" . }}
{{- end -}}

{{/* KubeRay sets app.kubernetes.io/name itself. */}}
{{- define "replayssm.selectorLabels" -}}
app.kubernetes.io/part-of: replayssm
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end -}}

{{- define "replayssm.monitoringLabels" -}}
{{ include "replayssm.labels" . }}
{{- with .Values.monitoring.release }}
release: {{ . }}
{{- end }}
{{- with .Values.monitoring.labels }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "replayssm.serviceAccountName" -}}
{{- $made := ternary (include "replayssm.fullname" .) "default" .Values.serviceAccount.create -}}
{{- default $made .Values.serviceAccount.name -}}
{{- end -}}

{{/* The service that KubeRay makes for a RayService. */}}
{{- define "replayssm.serveService" -}}
{{ include "replayssm.fullname" . }}-serve-svc
{{- end -}}

{{- define "replayssm.modelClaim" -}}
{{- default (printf "%s-models" (include "replayssm.fullname" .)) .Values.modelCache.existingClaim -}}
{{- end -}}

{{/* Keys of the application's `api` section that name files with secrets, and the entries of the Secret behind them. */}}
{{- define "replayssm.authFiles" -}}
{{- $auth := .Values.auth -}}
{{- $entries := dict "api_keys_file" $auth.apiKeysEntry "admin_token_file" $auth.adminTokenEntry -}}
{{- if not $auth.existingSecret -}}
{{- $keys := empty $auth.apiKeys | ternary "" "api-keys" -}}
{{- $token := empty $auth.adminToken | ternary "" "admin-token" -}}
{{- $entries = dict "api_keys_file" $keys "admin_token_file" $token -}}
{{- end -}}
{{- range $key, $entry := $entries -}}
{{- with $entry }}
{{ $key }}: {{ . }}
{{- end -}}
{{- end -}}
{{- end -}}

{{/* Name of the Secret with them, empty where there is none. */}}
{{- define "replayssm.authSecret" -}}
{{- if include "replayssm.authFiles" . -}}
{{ default (printf "%s-auth" (include "replayssm.fullname" .)) .Values.auth.existingSecret }}
{{- end -}}
{{- end -}}

{{- define "replayssm.authDir" -}}/etc/replayssm/auth{{- end -}}

{{/* Not empty where the router is kept on the head pod, so that one pod is scraped; see gcsFaultTolerance in values.yaml. */}}
{{- define "replayssm.routerOnHead" -}}
{{- if not .Values.gcsFaultTolerance.enabled }}yes{{ end -}}
{{- end -}}

{{/* Least and most worker pods. */}}
{{- define "replayssm.minWorkers" -}}
{{- $worker := .Values.config.worker -}}
{{- with $worker.autoscaling }}{{ default 1 .min_replicas }}{{ else }}{{ $worker.replicas }}{{ end -}}
{{- end -}}

{{- define "replayssm.maxWorkers" -}}
{{- $worker := .Values.config.worker -}}
{{- with $worker.autoscaling }}{{ .max_replicas }}{{ else }}{{ $worker.replicas }}{{ end -}}
{{- end -}}

{{/* Whole seconds that requests get to end before their pod does. */}}
{{- define "replayssm.drainSeconds" -}}
{{- default 60 .Values.config.worker.drain_timeout_s | ceil | int -}}
{{- end -}}

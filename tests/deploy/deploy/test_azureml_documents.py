"""Azure ML's documents: names of versions, and the settings that a model's version retains."""

from __future__ import annotations

from dataclasses import replace

from remora_deploy.deploy.azureml_documents import Settings, settings_of

SETTINGS = Settings("w.azurecr.io/remora:1", "azureml://d/1", environ=(("A", "b"),))


def test_a_version_retains_its_settings() -> None:
    settings = replace(SETTINGS, capture_share=20, count=3)
    assert settings_of({"properties": settings.model_version()}) == settings
    assert settings_of({"properties": {"modelUri": "azureml://d/1"}}) is None


def test_settings_of_releases_without_capture_are_read_and_keep_their_names() -> None:
    assert SETTINGS.digest == "f1ef6542"
    earlier = (
        '{"image": "w.azurecr.io/remora:1", "model": "azureml://d/1", "instance": "Standard_F4s_v2", "count": 1, '
        '"concurrency": 16, "startup_s": 600, "environ": [["A", "b"]]}'
    )
    assert settings_of({"properties": {"properties": {"remora": earlier}}}) == SETTINGS


def test_requests_and_answers_are_captured_at_the_share() -> None:
    document = replace(SETTINGS, capture_share=20).deployment("westeurope", "model", "environment")
    captured = document["properties"]["dataCollector"]["collections"]
    assert captured == {key: {"dataCollectionMode": "Enabled", "samplingRate": 0.2} for key in ("request", "response")}
    assert "dataCollector" not in SETTINGS.deployment("westeurope", "model", "environment")["properties"]

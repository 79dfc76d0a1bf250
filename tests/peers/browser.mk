# Suites of the page at / in a browser, and the pictures of the README. `make help-all` lists the targets.

BROWSER_PEERS := playwright==1.65.2 nbclient==0.11.0 ipykernel==7.4.0

.PHONY: pictures test-browser

# Without Chromium the tests of the page are skipped by name. Screenshots are kept in build/screenshots.
test-browser: $(VENV)/dev.stamp $(VENV)-browser/stamp  ## try the page at / in a headless Chromium and behind nginx, if installed, and functions in a Jupyter kernel
	NGINX=$$(command -v nginx) BROWSER_PYTHON=$(CURDIR)/$(VENV)-browser/bin/python \
	    $(PY) -m pytest tests/e2e/test_home_page.py tests/e2e/test_notebooks.py tests/e2e/test_behind_a_proxy.py -rs $(T)

pictures: $(VENV)/dev.stamp $(VENV)-browser/stamp  ## take the pictures of the README again, with Chromium
	KEEP_PICTURES=1 BROWSER_PYTHON=$(CURDIR)/$(VENV)-browser/bin/python $(PY) -m pytest tests/e2e/test_home_page.py -rs -k pictures

$(VENV)-browser/stamp: tests/peers/browser.mk
	$(call environment,$(BROWSER_PEERS))

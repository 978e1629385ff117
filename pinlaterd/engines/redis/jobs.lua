-- Jobs of either layout, one at a time: what scripts share that read whole jobs, end attempts or
-- remove jobs. Follows runs.lua.

local function open_jobs()
  local MOST_DIGITS = 19
  local LAST_ID = '9223372036854775807'
  local LARGEST_I32 = 2 ^ 31 - 1
  local MOST_GONE_AT_ONCE = 10000
  local MOST_AT_ONCE = 1000
  local jobs = {}

  -- What a script returns where something else lies in place of a lean queue's hashes, or of the
  -- runs of a priority, if one is given; else nil.
  function jobs.damage(queue, priority)
    return is_lean(queue)
        and (
          damage(jobs_key(queue), 'hash')
          or damage(updates_key(queue), 'hash')
          or (priority and damage(runs_key(queue, priority), 'zset'))
        )
      or nil
  end

  -- The same of the sets of a queue and priority, too.
  function jobs.damaged_place(queue, priority)
    local prefix = set_key(queue, priority, '')
    return jobs.damage(queue, priority)
      or damage(prefix .. PENDING, 'zset')
      or damage(prefix .. IN_PROGRESS, 'zset')
      or damage(prefix .. SUCCEEDED, 'zset')
      or damage(prefix .. FAILED, 'zset')
  end

  -- Whether a member of a set can be a job's number.
  function jobs.is_id(member)
    return string.find(member, '^[1-9][0-9]*$') ~= nil
      and (#member < MOST_DIGITS or (#member == MOST_DIGITS and member <= LAST_ID))
  end

  -- The text under an id in a hash of a lean queue, or nil; nil also in what is no hash.
  local function text_in(hash, id)
    local text = redis.pcall('HGET', hash, id)
    return type(text) == 'string' and text or nil
  end

  local function ms_in(seconds)
    local number = tonumber(seconds or nil)
    return number_in(number and number * 1000 + 0.5, -LATEST_ORDERED_MS, LATEST_MS)
  end

  local function read_plain(queue, id, body)
    local key = job_key(queue, id)
    local f = redis.pcall('HMGET', key, 'al', 'ar', 'ca', 'ua', 'ra', 'cd', 'cs', body and 'bd' or 'cs')
    if f.err then
      return nil
    end
    if not (f[1] or f[7]) and redis.call('EXISTS', key) == 0 then
      return nil
    end
    return {
      al = f[1], ar = f[2], ca = ms_in(f[3]), ua = ms_in(f[4]), ra = f[5], cd = f[6],
      cs = f[7] or '', bd = body and (f[8] or ''),
    }
  end

  local function read_lean(queue, id, body)
    local record = text_in(jobs_key(queue), id)
    if not record then
      return nil
    end
    local allowed, created, run_after, bytes, at =
      string.match(record, '^(%d+) (%-?%d+) (%-?%d+) (%d+);()')
    local begin = (at or 1) + (bytes or 0)
    local job = {
      al = allowed, ar = allowed, ca = tonumber(created), ua = tonumber(created), ra = run_after,
      cs = at and string.sub(record, at, begin - 1) or '',
      bd = body and string.sub(record, begin),
    }
    local al, ar, ua, ra, text =
      string.match(text_in(updates_key(queue), id) or '', '^(%d+) (%d+) (%-?%d+) (%-?%d+);(.*)$')
    if al then
      job.al, job.ar, job.ua, job.ra, job.cs = al, ar, tonumber(ua), ra, text
    end
    return job
  end

  -- A job by the names of fields that PinLater's have, but times in ms; nil if it was evicted.
  -- What is damaged is missing, and so is the claim (cd) in a lean queue. `body`: whether that is
  -- wanted, too.
  function jobs.read(queue, id, body)
    local job = (is_lean(queue) and read_lean or read_plain)(queue, id, body)
    if job then
      job.al = number_in(job.al, 0, LARGEST_I32)
      job.ar = number_in(job.ar, 0, LARGEST_I32)
      local latest = is_lean(queue) and LATEST_ORDERED_MS or LATEST_MS
      job.ra = number_in(job.ra, -LATEST_ORDERED_MS, latest)
    end
    return job
  end

  function jobs.exists(queue, id)
    if is_lean(queue) then
      return redis.pcall('HEXISTS', jobs_key(queue), id) == 1
    end
    return redis.call('TYPE', job_key(queue, id)).ok == 'hash'
  end

  -- Set fields of a job that was read; with the body, if that changes.
  function jobs.change(queue, id, job, changes)
    if not is_lean(queue) then
      local fields = {}
      changes.ua = string.format('%.3f', changes.ua / 1000)
      for field, value in pairs(changes) do
        fields[#fields + 1] = field
        fields[#fields + 1] = value
      end
      redis.call('HSET', job_key(queue, id), unpack(fields))
      return
    end
    local allowed, run_after = job.al or 1, job.ra or changes.ua
    if changes.bd then
      local head = string.format('%.0f %.0f %.0f %d;', allowed, job.ca or 0, run_after, #job.cs)
      redis.call('HSET', jobs_key(queue), id, head .. job.cs .. changes.bd)
    end
    local update = string.format(
      '%.0f %.0f %.0f %.0f;', changes.al or allowed, changes.ar or job.ar or allowed, changes.ua,
      changes.ra or run_after
    )
    redis.call('HSET', updates_key(queue), id, update .. (changes.cs or job.cs))
  end

  -- The field of a job in a hash of a queue, of which most have none: looked up once a script.
  local there = {}
  local function field_of(hash, id)
    if there[hash] == nil then
      there[hash] = redis.call('TYPE', hash).ok == 'hash'
    end
    return there[hash] and redis.call('HGET', hash, id) or nil
  end

  -- The key of a job, behind '=' or '*', or nil.
  function jobs.key_of(queue, id)
    return field_of(keys_key(queue), id)
  end

  -- What ply_ holds of a job, or nil.
  function jobs.expiry_of(queue, id)
    return field_of(expiries_key(queue), id)
  end

  -- What plz_ holds of a job, or nil.
  function jobs.exact_of(queue, id)
    return field_of(exact_key(queue), id)
  end

  -- Remove the options of a job, if it has any.
  function jobs.free_options(queue, id)
    local key = jobs.key_of(queue, id)
    if jobs.expiry_of(queue, id) then
      redis.call('HDEL', expiries_key(queue), id)
    end
    if jobs.exact_of(queue, id) then
      redis.call('HDEL', exact_key(queue), id)
    end
    if key then
      redis.call('HDEL', keys_key(queue), id)
      jobs.free_key(queue, id, key)
    end
  end

  -- Free a key, as it is behind '=' or '*', if that job holds it.
  function jobs.free_key(queue, id, key)
    local of_all, name = string.sub(key, 1, 1) == '*', string.sub(key, 2)
    local holders = holders_key(of_all and '' or queue)
    local holder = redis.pcall('HGET', holders, name)
    local pattern = of_all and '^%d+ (%d+ .+)$' or '^%d+ (%d+)$'
    local held = type(holder) == 'string' and string.match(holder, pattern)
    if held == (of_all and id .. ' ' .. queue or id) then
      redis.call('HDEL', holders, name)
    end
  end

  -- Whether it was there.
  function jobs.remove(queue, id)
    jobs.free_options(queue, id)
    if not is_lean(queue) then
      return redis.call('UNLINK', job_key(queue, id)) == 1
    end
    redis.pcall('HDEL', updates_key(queue), id)
    return redis.pcall('HDEL', jobs_key(queue), id) == 1
  end

  -- Take a job out of a state; whether it was in it.
  function jobs.leave(queue, priority, id, state)
    if not has_runs(queue, state) then
      return redis.pcall('ZREM', set_key(queue, priority, state), id) == 1
    end
    local number = tonumber(id)
    return #runs_of(queue, priority).cut(number, number, state) > 0
  end

  -- Put a job that is in none into a state; PENDING, it is held by nobody.
  function jobs.enter(queue, priority, id, state, ms, claim)
    if has_runs(queue, state) then
      local number = tonumber(id)
      local run = { state = state, first = number, last = number, ms = ms }
      run.claimer, run.number = split_claim(claim)
      runs_of(queue, priority).put(run)
      return
    end
    if state == PENDING and not is_lean(queue) then
      redis.call('HDEL', job_key(queue, id), 'cd')
    end
    add_all(set_key(queue, priority, state), queue, ms, { id })
  end

  -- Since when a job is in a state, and its claim if it is in a run; nil if it is not in it.
  function jobs.since(queue, priority, id, state)
    if has_runs(queue, state) then
      local run = runs_of(queue, priority).holding(tonumber(id))
      if run and run.state == state then
        return run.ms, claim_in(run, tonumber(id))
      end
      return nil
    end
    local score = redis.pcall('ZSCORE', set_key(queue, priority, state), id)
    return type(score) == 'string' and ms_of(queue, score) or nil
  end

  -- The source in HOST:PORT:STARTMILLIS:SOURCE:COUNTER; nil if it is not of that form.
  local function claim_source(claim)
    return string.match(claim, '^[^:]*:[^:]*:[^:]*:(.*):[^:]*$')
  end

  -- Take a job out of IN_PROGRESS that is held by a claim, if one is given, or else by a source, if
  -- that is; the job, or nil if there is none.
  function jobs.take_held(queue, priority, id, claim, source)
    local runs, number = is_lean(queue) and runs_of(queue, priority), tonumber(id)
    local piece, since
    if runs then
      piece = runs.cut(number, number, IN_PROGRESS)[1]
      since = piece and piece.ms
    else
      since = jobs.since(queue, priority, id, IN_PROGRESS)
    end
    local job, is_held = since and jobs.read(queue, id), false
    if job then
      job.cd = piece and claim_in(piece, number) or job.cd or ''
      job.ra = job.ra or since
      is_held = job.cd == claim
        or (claim == nil and (source == nil or claim_source(job.cd) == source))
    end
    if runs and job and not is_held then
      runs.put(piece)
    elseif not runs and since and (is_held or not job) then -- held or evicted
      redis.pcall('ZREM', set_key(queue, priority, IN_PROGRESS), id)
    end
    return is_held and job or nil
  end

  -- A held job that was taken is PENDING with one attempt less, or FAILED with none; true if
  -- PENDING.
  function jobs.fail(queue, priority, id, job, retry_ms, status, now)
    local remaining = job.ar or 1
    local changes = { ar = math.max(0, remaining - 1), ra = job.ra, ua = now, cs = status }
    if remaining > 1 then
      changes.ra = retry_ms
      jobs.enter(queue, priority, id, PENDING, retry_ms)
    else
      jobs.enter(queue, priority, id, FAILED, now, job.cd)
    end
    jobs.change(queue, id, job, changes)
    return remaining > 1
  end

  -- The first characters of a text in UTF-8.
  function jobs.cut(text, most_chars)
    local chars = 0
    for at = 1, #text > most_chars and #text or 0 do
      local byte = string.byte(text, at)
      if byte < 128 or byte > 191 then -- the first byte of a character
        chars = chars + 1
        if chars > most_chars then
          return string.sub(text, 1, at - 1)
        end
      end
    end
    return text
  end

  -- Fail a job that is PENDING and past its expiry; whether it was.
  function jobs.expire(queue, priority, id, now, status_chars)
    local expiry = jobs.expiry_of(queue, id)
    local at = expiry and tonumber(string.match(expiry, '^%-?%d+'))
    local job = at and at <= now and jobs.read(queue, id, false)
    if not (job and jobs.leave(queue, priority, id, PENDING)) then
      return false
    end
    local status = jobs.cut(job.cs, status_chars - 8) -- without ' expired'
    status = status == '' and 'expired' or status .. ' expired'
    jobs.change(queue, id, job, { ra = job.ra, ua = now, cs = status })
    jobs.enter(queue, priority, id, FAILED, now, '')
    redis.call('HSET', expiries_key(queue), id, string.format('%.0f expired', at))
    redis.call('ZREM', checks_key(queue), priority .. ' ' .. id)
    return true
  end

  -- A job that has failed is PENDING again: note that it has not ended after all.
  function jobs.watch_again(queue, priority, id)
    local at = string.match(jobs.expiry_of(queue, id) or '', '^%-?%d+')
    if at then
      redis.call('HSET', expiries_key(queue), id, at)
      redis.call('ZADD', checks_key(queue), at, priority .. ' ' .. id)
    end
  end

  -- Take the first jobs of a state out of it, `limit` at most, with scores from `least` to `most`.
  -- Returns those that there still are (id, the time since which it was in that state, and its claim
  -- if it was in a run), and how many others there were.
  local function pop(queue, priority, state, least, most, limit)
    local set, popped, gone = set_key(queue, priority, state), {}, 0
    local runs = has_runs(queue, state) and runs_of(queue, priority)
    if runs then
      runs.flush()
    end
    local rows =
      redis.call('ZRANGEBYSCORE', set, least, most, 'WITHSCORES', 'LIMIT', 0, limit)

    local function add(id, since, claim)
      if jobs.is_id(id) and jobs.exists(queue, id) then
        popped[#popped + 1] = { id = id, since = since, claim = claim }
      else
        jobs.free_options(queue, id)
        gone = gone + 1
      end
    end

    for at = 1, #rows, 2 do
      local member, left = rows[at], limit - #popped - gone
      local run = runs and runs.holding(tonumber(member) or 0)
      if not runs then
        redis.call('ZREM', set, member)
        add(member, ms_of(queue, rows[at + 1]))
      elseif not run or run.state ~= state or run.last ~= tonumber(member) then
        redis.call('ZREM', set, member)
        gone = gone + 1
      elseif left > 0 then
        for _, piece in
          ipairs(runs.cut(run.first, math.min(run.last, run.first + left - 1), state))
        do
          for id = piece.first, piece.last do
            add(string.format('%d', id), piece.ms, claim_in(piece, id))
          end
        end
      end
    end
    if runs then
      runs.flush()
    end
    return popped, gone
  end

  -- Take the first jobs of a state out of it, `limit` at most, and give `visit` each. What is no
  -- job, or was evicted, goes on the way, so many at once and no more.
  function jobs.visit_first(queue, priority, state, least, most, limit, visit)
    local visited, all_gone = 0, 0
    while visited < limit and all_gone < MOST_GONE_AT_ONCE do
      local at_once = math.min(limit - visited, MOST_AT_ONCE)
      local popped, gone = pop(queue, priority, state, least, most, at_once)
      if #popped + gone == 0 then
        break
      end
      for _, job in ipairs(popped) do
        visit(job.id, job.since, job.claim)
      end
      visited, all_gone = visited + #popped, all_gone + gone
    end
    return visited
  end

  return jobs
end
